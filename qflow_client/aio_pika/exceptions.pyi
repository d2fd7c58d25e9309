from aio_pika.exceptions import *
