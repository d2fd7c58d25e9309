from pika.heartbeat import *
