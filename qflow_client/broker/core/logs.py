"""Loggers that replace control characters in texts of clients, such as queue names."""

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
    """Return the logger of a module. The logger makes the text arguments of its records printable."""
    logger = logging.getLogger(name)
    logger.addFilter(_PRINTABLE)
    return logger
