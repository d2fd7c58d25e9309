"""The position of ``qflow send`` in its input file, as the outbox stores it (E13)."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from qflow_client.cli.errors import CommandError
from qflow_client.cli.records import Format, Place

__all__ = ["Reached", "source_of"]

_WORDS = re.compile(r"(\w+) record=(\d+) line=(\d+) offset=(\d+) last=(\d+) crc=([0-9a-f]{8}) sent=(\d+)", re.ASCII)


def source_of(file: str, exchange: str, routing_key: str) -> str:
    """Return the name under which the outbox stores the position in `file` for this exchange and routing key."""
    # A path may contain bytes that are not valid UTF-8, but the outbox stores the name as text.
    path = os.fsencode(Path(file).resolve()).decode(errors="backslashreplace")
    return f"{path} to {exchange!r}/{routing_key!r}"


@dataclass(frozen=True, slots=True)
class Reached:
    """How much of a file was sent.

    Attributes:
        place: end of the last record that need not be sent again.
        sent: highest number of a record that any run has sent. If a record up to this number is sent again, a header
            marks it as a possible copy.
    """

    format: Format
    place: Place
    sent: int = 0

    def __str__(self) -> str:
        at = self.place
        return (
            f"{self.format} record={at.number} line={at.line} offset={at.offset} last={at.last_line} "
            f"crc={at.checksum:08x} sent={self.sent}"
        )

    @classmethod
    def parse(cls, text: int | str | None, format: Format, name: str) -> Self:
        """Parse a stored position; ``None`` is the start of the file. Raise `CommandError` for an invalid position."""
        if text is None:
            return cls(format, Place())
        found = _WORDS.fullmatch(str(text))
        if found is None:
            raise CommandError(f"{name}: the position in the outbox is not one of qflow send: {text!r}")
        if found[1] != format:
            raise CommandError(f"{name}: an earlier run sent the file in the format {found[1]}, not {format}")
        number, line, offset, last_line = map(int, found.group(2, 3, 4, 5))
        return cls(format, Place(number, line, offset, last_line, int(found[6], 16)), int(found[7]))
