from aio_pika.patterns.base import *
