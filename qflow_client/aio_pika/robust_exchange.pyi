from aio_pika.robust_exchange import *
