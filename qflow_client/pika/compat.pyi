from pika.compat import *
