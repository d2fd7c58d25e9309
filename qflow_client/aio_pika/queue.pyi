from aio_pika.queue import *
