"""Positions, which show how far a program has read a source of messages."""

from __future__ import annotations

from dataclasses import dataclass

from qflow_client.redaction import shown

__all__ = ["Position"]

# SQLite stores integers of 64 bits.
_MIN, _MAX = -(1 << 63), (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Position:
    """How far a program has read a source of messages, such as a file or a topic (E13).

    A producer with an outbox stores the position in the same commit as the message: ``producer.send(row,
    position=Position("orders.csv", 1200))``. After a crash, ``producer.position("orders.csv")`` returns the last stored
    position, after which the program can continue to read.

    Attributes:
        source: name of the source, such as a path or a topic. Each source has its own position.
        value: the place in the source, such as an offset or a key. An ``int`` has at most 64 bits.

    Raises:
        TypeError: `source` is not a ``str``, or `value` is neither ``int`` nor ``str``.
        ValueError: `value` is an ``int`` with more than 64 bits, or a text is not valid Unicode.
    """

    source: str
    value: int | str

    def __post_init__(self) -> None:
        source, value = self.source, self.value
        if not isinstance(source, str):
            raise TypeError(f"Position: source must be a str, not {type(source).__name__}: {shown(source)}")
        _check_text(source, "source")
        if isinstance(value, str):
            _check_text(value, "value")
        elif not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"Position: value must be an int or a str, not {type(value).__name__}: {shown(value)}")
        elif not _MIN <= value <= _MAX:
            raise ValueError(
                f"Position: value must be an int of 64 bits, not {shown(value)}; use a str for larger values"
            )


def _check_text(text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"Position: {name} must be valid Unicode, not {shown(text)}: {error.reason}") from None
