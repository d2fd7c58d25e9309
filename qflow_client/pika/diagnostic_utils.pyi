from pika.diagnostic_utils import *
