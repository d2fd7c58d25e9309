from aio_pika.pool import *
