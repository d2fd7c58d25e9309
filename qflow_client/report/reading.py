"""Finds the files of flow logs, reads their lines, and converts the lines to Parquet."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, cast

from qflow_client.errors import QflowError

__all__ = ["COLUMNS", "FlowLogError", "FlowLogs", "Part", "line_of", "parquet_schema", "parts_of", "raws", "to_parquet"]

_KINDS = (".jsonl", ".jsonl.gz", ".parquet")
# Number of bytes to read at the end of a file, in order to find the last line.
_TAIL = 64 << 10
_BLOCK = 1 << 20
# Maximum number of rows of a Parquet file to keep in memory at the same time.
_ROWS = 20_000


def _parser() -> Callable[[str | bytes], Any]:
    try:
        import orjson
    except ImportError:
        return json.loads
    loads: Callable[[str | bytes], Any] = orjson.loads
    return loads


_loads = _parser()


class FlowLogError(QflowError):
    """A flow log cannot be read or converted. The text contains the path."""


class FlowLogs:
    """Finds the files of flow logs, and yields their lines.

    Args:
        paths: folders and files. A folder stands for all flow logs in it, except unfinished files of `to_parquet`.

    Raises:
        FlowLogError: a path does not exist, a file name has an unknown ending, or `paths` contain no flow log at all.
    """

    def __init__(self, paths: Sequence[str | os.PathLike[str]]) -> None:
        #: The files in the order of `paths`. The files of one folder are sorted by name.
        self.files: list[Path] = []
        #: Number of invalid lines that `lines` has parsed so far. A killed process may leave an incomplete line.
        self.unreadable = 0
        for path in map(Path, paths):
            if path.is_dir():
                unfinished = set(path.glob("_*.parquet"))
                self.files += sorted({each for each in path.iterdir() if each.name.endswith(_KINDS)} - unfinished)
            elif not path.exists():
                raise FlowLogError(f"{path}: there is no such file or folder")
            elif not path.name.endswith(_KINDS):
                raise FlowLogError(f"{path}: the name of a flow log must end with {' or '.join(_KINDS)}")
            else:
                self.files.append(path)
        if not self.files:
            raise FlowLogError(
                f"{', '.join(map(str, paths))}: there is no flow log, a file that ends with {' or '.join(_KINDS)}"
            )

    @property
    def size(self) -> int:
        """The total size of all files in bytes."""
        return sum(path.stat().st_size for path in self.files)

    def span(self) -> tuple[int, int]:
        """Estimate the times of the first and last line, in microseconds since 1970, from the ends of each file."""
        times = [at for path in self.files for at in _ends(path)]
        return (min(times), max(times)) if times else (0, 0)

    def lines(self, only: str | None = None) -> Iterator[dict[str, Any]]:
        """Yield the lines of the kind `only`, or all lines if it is ``None``."""
        for path in self.files:
            if path.suffix == ".parquet":
                yield from (line for line in _parquet_lines(path) if only is None or line["kind"] == only)
            else:
                yield from self._json_lines(path, only)

    def _json_lines(self, path: Path, only: str | None) -> Iterator[dict[str, Any]]:
        # To save time, do not parse lines without this text, because they cannot have the kind `only`.
        mark = b"" if only is None else b'"%s"' % only.encode()
        with _open(path) as file:
            for raw in file:
                if mark not in raw:
                    continue
                line = line_of(raw)
                if line is None:
                    self.unreadable += 1
                elif only is None or line["kind"] == only:
                    yield line


def line_of(raw: str | bytes) -> dict[str, Any] | None:
    """Parse a line of a flow log. Return ``None`` if it is not a JSON object with an int ``at`` and a str ``kind``."""
    try:
        line = _loads(raw)
    except ValueError:
        try:
            # `json.loads` accepts NaN and numbers of more than 64 bits, which orjson rejects.
            line = json.loads(raw)
        except ValueError:
            return None
    is_line = isinstance(line, dict) and isinstance(line.get("at"), int) and isinstance(line.get("kind"), str)
    return line if is_line else None


@dataclass(frozen=True, slots=True)
class Part:
    """The lines that begin in one part of a file. An `end` of ``None`` is the end of the file."""

    path: str
    start: int = 0
    end: int | None = None


def parts_of(path: Path, size: int) -> Iterator[Part]:
    """Split a file of lines into parts of at most `size` bytes. A compressed file is one part, whatever its size."""
    if path.suffix == ".gz":
        yield Part(str(path))
        return
    whole = path.stat().st_size
    for start in range(0, whole, size):
        yield Part(str(path), start, min(start + size, whole))


def raws(part: Part) -> Iterator[list[bytes]]:
    """Yield the unparsed lines that begin in the part, as lists of lines. Each list has about 1 MiB."""
    with _open(Path(part.path)) as file:
        at = part.start
        if at:
            # Skip the rest of a line that begins before this part.
            file.seek(at - 1)
            at += len(file.readline()) - 1
        while part.end is None or at < part.end:
            wanted = _BLOCK if part.end is None else min(_BLOCK, part.end - at)
            # `readline` reads the rest of the last line, so the block has only whole lines.
            block = file.read(wanted - 1) + file.readline()
            if not block:
                return
            at += len(block)
            lines = block.split(b"\n")
            if not lines[-1]:
                lines.pop()
            yield lines


@contextmanager
def _open(path: Path) -> Iterator[IO[bytes]]:
    """Open a file of lines. If the ``with`` block reads damaged compressed data, raise `FlowLogError`."""
    with cast("IO[bytes]", gzip.open(path)) if path.suffix == ".gz" else path.open("rb", buffering=1 << 20) as file:
        try:
            yield file
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise FlowLogError(f"{path}: the compressed data is damaged: {error}") from error


def _at(raw: bytes) -> int | None:
    line = line_of(raw)
    return None if line is None else line["at"]


def _ends(path: Path) -> list[int]:
    if path.suffix == ".parquet":
        return _parquet_ends(path)
    with _open(path) as file:
        found = [_at(file.readline())]
        if path.suffix == ".gz":
            # The last line of a compressed file can only be found by reading the whole file.
            last = b""
            for last in file:  # noqa: B007  # only the last line is used
                pass
            found.append(_at(last))
        else:
            file.seek(max(0, path.stat().st_size - _TAIL))
            found += [_at(raw) for raw in file.read().splitlines()[-2:]]
    return [at for at in found if at is not None]


def _pyarrow(path: Path) -> Any:
    if find_spec("pyarrow") is None:
        raise FlowLogError(f"{path}: Parquet needs pyarrow: pip install 'qflow-client[spark]'")
    import pyarrow.parquet

    return pyarrow


def parquet_schema(pyarrow: Any) -> Any:
    """Return the schema of a Parquet file that contains a flow log."""
    text, number = pyarrow.string(), pyarrow.int64()
    counts = pyarrow.map_(text, number)
    return pyarrow.schema([(name, {"text": text, "number": number, "counts": counts}[kind]) for name, kind in COLUMNS])


#: Name and type of each field that a line of a flow log can have.
COLUMNS = (
    ("at", "number"),
    ("kind", "text"),
    ("origin", "text"),
    ("producer", "text"),
    ("connection", "text"),
    ("queue", "text"),
    ("reason", "text"),
    ("source", "text"),
    ("detail", "text"),
    ("since", "number"),
    ("begun", "number"),
    ("flowed_since", "number"),
    ("first", "text"),
    ("after", "text"),
    ("free_us", "number"),
    ("free_messages", "number"),
    ("unsettled", "number"),
    ("capacity", "number"),
    ("waiting", "number"),
    ("causes", "counts"),
    ("us", "number"),
    ("depth", "number"),
    ("bytes", "number"),
    ("peak", "number"),
    ("peak_bytes", "number"),
    ("arrived", "number"),
    ("arrived_bytes", "number"),
    ("left", "number"),
    ("left_bytes", "number"),
    ("arrivals", "counts"),
    ("stop", "number"),
    ("resume", "number"),
    ("stop_bytes", "number"),
    ("resume_bytes", "number"),
    ("overshoot", "number"),
    ("overshoot_bytes", "number"),
    ("lost", "number"),
)
_MAPS = tuple(name for name, kind in COLUMNS if kind == "counts")


@contextmanager
def _parquet_file(path: Path) -> Iterator[Any]:
    pyarrow = _pyarrow(path)
    try:
        yield pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise FlowLogError(f"{path}: {error}") from error


def _parquet_lines(path: Path) -> Iterator[dict[str, Any]]:
    with _parquet_file(path) as file:
        for batch in file.iter_batches(batch_size=_ROWS):
            for row in batch.to_pylist():
                line = {name: value for name, value in row.items() if value is not None}
                for name in _MAPS:
                    if name in line:
                        line[name] = dict(line[name])
                yield line


def _parquet_ends(path: Path) -> list[int]:
    with _parquet_file(path) as file:
        metadata = file.metadata
    names = metadata.schema.names
    if "at" not in names:
        raise FlowLogError(f"{path}: this is not a flow log: there is no column 'at'")
    column = names.index("at")
    found = []
    for group in range(metadata.num_row_groups):
        statistics = metadata.row_group(group).column(column).statistics
        if statistics is not None and statistics.has_min_max:
            found += [statistics.min, statistics.max]
    return found


def to_parquet(logs: FlowLogs, target: str | os.PathLike[str]) -> int:
    """Write flow logs to one Parquet file, and return the number of lines.

    Args:
        target: path of the new file. While the file is incomplete, its name begins with an underscore.

    Raises:
        FlowLogError: `target` is a folder, pyarrow is missing, or a line does not belong to a flow log.
    """
    path = Path(target)
    if path.is_dir():
        raise FlowLogError(f"{path}: this is a folder; name a file")
    pyarrow = _pyarrow(path)
    schema = parquet_schema(pyarrow)
    unfinished = path.with_name(f"_{path.name}")
    count = 0
    try:
        with pyarrow.parquet.ParquetWriter(unfinished, schema, compression="zstd") as writer:
            batch: list[dict[str, Any]] = []
            for line in logs.lines():
                batch.append(line)
                if len(batch) == _ROWS:
                    writer.write_table(pyarrow.Table.from_pylist([_with_maps(each) for each in batch], schema=schema))
                    count += len(batch)
                    batch.clear()
            writer.write_table(pyarrow.Table.from_pylist([_with_maps(each) for each in batch], schema=schema))
    except (AttributeError, pyarrow.ArrowException) as error:
        files = ", ".join(map(str, logs.files))
        raise FlowLogError(f"{files}: a line or row does not belong to a flow log: {error}") from error
    unfinished.rename(path)
    return count + len(batch)


def _with_maps(line: dict[str, Any]) -> dict[str, Any]:
    return line | {name: list(line[name].items()) for name in _MAPS if name in line}
