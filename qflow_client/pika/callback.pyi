from pika.callback import *
