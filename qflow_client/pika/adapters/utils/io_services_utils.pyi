from pika.adapters.utils.io_services_utils import *
