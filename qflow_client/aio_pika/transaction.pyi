from aio_pika.transaction import *
