from aio_pika.tools import *
