from pika.adapters.utils import *
