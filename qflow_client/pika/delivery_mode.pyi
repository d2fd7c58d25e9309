from pika.delivery_mode import *
