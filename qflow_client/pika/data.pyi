from pika.data import *
