from aio_pika.message import *
