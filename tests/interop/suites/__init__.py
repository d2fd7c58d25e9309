"""The suites of clients of other hands, run against RabbitMQ and against the broker here; see `run.py`."""
