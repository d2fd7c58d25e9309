from aio_pika.exchange import *
