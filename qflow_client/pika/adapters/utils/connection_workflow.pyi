from pika.adapters.utils.connection_workflow import *
