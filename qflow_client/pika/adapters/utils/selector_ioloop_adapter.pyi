from pika.adapters.utils.selector_ioloop_adapter import *
