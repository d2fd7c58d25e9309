from aio_pika.patterns.master import *
