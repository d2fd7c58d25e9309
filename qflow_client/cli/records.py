"""Records in files: each becomes one message."""

from __future__ import annotations

import csv
import gzip
import json
import sys
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePath
from types import TracebackType
from typing import IO, Self, cast

from qflow_client import Message
from qflow_client.cli.errors import CommandError

__all__ = ["BadRecord", "Format", "Record", "RecordSource"]

_JSON = "application/json"


class Format(StrEnum):
    """How records stand in a file."""

    LINES = "lines"
    CSV = "csv"
    JSONL = "jsonl"

    @classmethod
    def of(cls, name: str) -> Format:
        """The format that a file's name speaks of, whatever it is compressed with."""
        endings = [ending.lower() for ending in PurePath(name).suffixes]
        if endings and endings[-1] in _COMPRESSED:
            endings.pop()
        return _FORMATS.get(endings[-1], cls.LINES) if endings else cls.LINES


_COMPRESSED = (".gz", ".zip")
_FORMATS = {".csv": Format.CSV, ".jsonl": Format.JSONL, ".ndjson": Format.JSONL}


class BadRecord(CommandError):
    """A record that cannot be read; the text names file and line."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record.

    Attributes:
        number: its place in the file, from 1.
        line: the number of its last line, from 1.
        message: what is sent for it.
    """

    number: int
    line: int
    message: bytes | Message


class RecordSource:
    """The records of a file, read as they are asked for. A context manager.

    Args:
        file: its path; ``-`` for `standard_input`. One that ends in ``.gz``, or in ``.zip`` with one file in it, is
            decompressed.
        format: how the records stand in it; by the ending of its name unless given.
        standard_input: what to read for ``-``; ``None`` if it is closed.

    Raises:
        OSError: it cannot be opened.
        CommandError: it is not what its ending says.
    """

    def __init__(self, file: str, format: Format | None, standard_input: IO[bytes] | None) -> None:
        #: For people.
        self.name = "standard input" if file == "-" else file
        #: Bytes of the file as it is stored; ``None`` if it is not known.
        self.size: int | None = None
        self._stack = ExitStack()
        # The file as it is stored; None for standard input.
        self._stored: IO[bytes] | None = None
        inner = file
        if file == "-":
            if standard_input is None:
                raise CommandError("standard input is closed; name a file")
            self._content = standard_input
        else:
            path = Path(file)
            self._stored = self._stack.enter_context(path.open("rb"))
            if self._stored.seekable():
                self.size = path.stat().st_size
            self._content = self._stored
            ending = path.suffix.lower()
            if ending == ".gz":
                self._content = cast("IO[bytes]", self._stack.enter_context(gzip.GzipFile(fileobj=self._stored)))
            elif ending == ".zip":
                inner = self._open_archive(self._stored)
        self.format = format or Format.of(inner)

    def _open_archive(self, stored: IO[bytes]) -> str:
        try:
            archive = self._stack.enter_context(zipfile.ZipFile(stored))
            names = [info.filename for info in archive.infolist() if not info.is_dir()]
            if len(names) != 1:
                raise CommandError(f"{self.name}: an archive must hold one file, this one holds {len(names)}")
            self._content = self._stack.enter_context(archive.open(names[0]))
        except CommandError:
            self._stack.close()
            raise
        except (zipfile.BadZipFile, RuntimeError) as error:
            # A RuntimeError is how it says that the file is encrypted, or compressed in a way that it does not know.
            self._stack.close()
            raise CommandError(f"{self.name}: {error}") from error
        return names[0]

    @property
    def position(self) -> int:
        """How many bytes of the file as it is stored have been read; 0 if its size is not known."""
        return 0 if self.size is None or self._stored is None or self._stored.closed else self._stored.tell()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def __iter__(self) -> Iterator[Record]:
        """The records in order.

        Raises:
            BadRecord: one that cannot be read. Those before it came first.
        """
        readers = {Format.LINES: self._lines, Format.CSV: self._csv, Format.JSONL: self._jsonl}
        try:
            yield from readers[self.format]()
        except (EOFError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error) as error:
            raise BadRecord(f"{self.name}: the compressed data is damaged: {error}") from error
        except OSError as error:
            raise BadRecord(f"{self.name}: cannot be read on: {error.strerror or error}") from error

    def _lines(self) -> Iterator[Record]:
        for number, line in enumerate(self._content, 1):
            yield Record(number, number, _without_end(line))

    def _jsonl(self) -> Iterator[Record]:
        number = 0
        for line_number, line in enumerate(self._content, 1):
            text = line.strip()
            if line_number == 1:
                text = text.removeprefix(b"\xef\xbb\xbf")
            if not text:
                continue
            try:
                json.loads(text.decode(), parse_constant=_refuse_constant)
            except (ValueError, RecursionError) as error:
                raise BadRecord(f"{self.name}, line {line_number}: not JSON: {error}") from error
            number += 1
            yield Record(number, line_number, Message(text, content_type=_JSON))

    def _csv(self) -> Iterator[Record]:
        # A record may be as large as a message, and the limit is the process's.
        csv.field_size_limit(sys.maxsize)
        reader = csv.reader(_Text(self._content), strict=True)
        encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
        names: list[str] = []
        number = 0
        while True:
            try:
                row = next(reader, None)
            except (csv.Error, UnicodeDecodeError) as error:
                # What cannot be decoded does not count as read.
                line = reader.line_num + isinstance(error, UnicodeDecodeError)
                raise BadRecord(f"{self.name}, line {line}: not CSV: {error}") from error
            if row is None:
                return
            if not row:
                continue
            if not names:
                names = row
                twice = sorted({name for name in names if names.count(name) > 1})
                if twice:
                    raise BadRecord(
                        f"{self.name}, line {reader.line_num}: two columns are named {', '.join(map(repr, twice))}"
                    )
                continue
            if len(row) != len(names):
                raise BadRecord(
                    f"{self.name}, line {reader.line_num}: {len(row)} fields, but the first row names {len(names)}"
                )
            number += 1
            body = encode(dict(zip(names, row, strict=True))).encode()
            yield Record(number, reader.line_num, Message(body, content_type=_JSON))


class _Text:
    """The lines of a file, decoded one by one, so that an error belongs to its line."""

    def __init__(self, content: IO[bytes]) -> None:
        self._lines = iter(content)
        self._encoding = "utf-8-sig"

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        text = next(self._lines).decode(self._encoding)
        # Only the first line may begin with a byte order mark.
        self._encoding = "utf-8"
        return text


def _without_end(line: bytes) -> bytes:
    if line.endswith(b"\r\n"):
        return line[:-2]
    return line[:-1] if line.endswith(b"\n") else line


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")
