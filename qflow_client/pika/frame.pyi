from pika.frame import *
