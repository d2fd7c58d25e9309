from pika.adapters.utils.nbio_interface import *
