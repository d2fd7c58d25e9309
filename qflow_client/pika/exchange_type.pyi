from pika.exchange_type import *
