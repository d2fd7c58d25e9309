from pika.validators import *
