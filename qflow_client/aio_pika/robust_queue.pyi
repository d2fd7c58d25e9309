from aio_pika.robust_queue import *
