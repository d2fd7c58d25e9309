from aio_pika.abc import *
