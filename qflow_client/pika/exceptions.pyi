from pika.exceptions import *
