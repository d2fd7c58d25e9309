"""Test suites of other projects' clients, run with RabbitMQ and with the broker of this repository; see `run.py`."""
