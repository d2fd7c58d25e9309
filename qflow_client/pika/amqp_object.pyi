from pika.amqp_object import *
