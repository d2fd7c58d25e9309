from pika.adapters.base_connection import *
