from aio_pika.log import *
