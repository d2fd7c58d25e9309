from aio_pika.patterns import *
