from pika.spec import *
