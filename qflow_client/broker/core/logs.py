"""Loggers that write what clients have chosen, such as names of queues, without control characters."""

from __future__ import annotations

import logging

from qflow_client.redaction import printable

__all__ = ["get_logger"]


class _Printable(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(
                printable(str(each)) if isinstance(each, (str, BaseException)) else each for each in record.args
            )
        return True


_PRINTABLE = _Printable()


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; the texts among the arguments of its records are printable."""
    logger = logging.getLogger(name)
    logger.addFilter(_PRINTABLE)
    return logger
