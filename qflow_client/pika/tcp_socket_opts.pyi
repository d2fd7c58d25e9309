from pika.tcp_socket_opts import *
