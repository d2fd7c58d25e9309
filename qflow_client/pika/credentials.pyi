from pika.credentials import *
