from aio_pika.patterns.rpc import *
