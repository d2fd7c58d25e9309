"""Reads records from files. Each record becomes one message."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import select
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path, PurePath
from typing import IO, Any, Final, Self, cast

from qflow_client import Message
from qflow_client.cli.errors import CommandError, ExitCode

__all__ = ["BadRecord", "Format", "Place", "Reading", "Record", "RecordSource"]

_JSON = "application/json"


class Format(StrEnum):
    """The format of the records in a file."""

    LINES = "lines"
    CSV = "csv"
    JSONL = "jsonl"

    @classmethod
    def of(cls, name: str) -> Format:
        """Return the format for the ending of a file name. A final ``.gz`` or ``.zip`` is ignored."""
        endings = [ending.lower() for ending in PurePath(name).suffixes]
        if endings and endings[-1] in _COMPRESSED:
            endings.pop()
        return _FORMATS.get(endings[-1], cls.LINES) if endings else cls.LINES


_COMPRESSED = (".gz", ".zip")
_FORMATS = {".csv": Format.CSV, ".jsonl": Format.JSONL, ".ndjson": Format.JSONL}


#: Maximum bytes of a line, and of a CSV field. RabbitMQ 3.8 to 3.13 accepts messages up to this size by default.
MAX_LINE: Final = 128 << 20


class BadRecord(CommandError):
    """A record cannot be read. The text names the file, and the line if it is known."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record of a file, with the message to send. `line` is the number of the record's last line in the file."""

    number: int
    line: int
    message: bytes | Message


@dataclass(frozen=True, slots=True)
class Place:
    """The end of a record in its file. With `last_line` and `checksum`, a later ``qflow send`` detects a changed file.

    Attributes:
        number: number of the record; 0 for the start of the file.
        line: number of the record's last line in the file.
        offset: number of bytes of the decompressed file up to the end of the record.
        last_line: length of the record's last line in bytes.
        checksum: CRC-32 of the record's last line.
    """

    number: int = 0
    line: int = 0
    offset: int = 0
    last_line: int = 0
    checksum: int = 0


@dataclass(frozen=True, slots=True)
class Reading:
    """Converts records to messages.

    Attributes:
        delimiter: separator of the fields in a CSV file; one character.
        encoding: encoding of a CSV file. In this encoding, ``a`` and a line end must be the same bytes as in ASCII.
        message_id: CSV column or JSON key with the message id; ``None`` if the records have no message ids.

    Raises:
        CommandError: `delimiter` or `encoding` is not allowed.
    """

    delimiter: str = ","
    encoding: str = "utf-8"
    message_id: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.delimiter) != 1 or self.delimiter in '"\r\n':
            raise CommandError(f"--delimiter {self.delimiter!r}: it must be one character, or 'tab'", ExitCode.USAGE)
        try:
            is_usable = "a\n".encode(self.encoding) == b"a\n"
        except (LookupError, UnicodeError):
            is_usable = False
        if not is_usable:
            raise CommandError(
                f"--encoding {self.encoding}: it cannot be used; use utf-8, latin-1, cp1252 or a similar one",
                ExitCode.USAGE,
            )

    def message(self, body: bytes, content_type: str | None, values: object) -> bytes | Message:
        """Create the message of a record.

        Args:
            values: the parsed record, such as a mapping from column names or JSON keys; ``None`` for a line.

        Raises:
            ValueError: `Reading.message_id` is set, but this column or key of the record has no integer or text.
        """
        message_id = None
        if self.message_id is not None:
            found = values.get(self.message_id) if isinstance(values, dict) else None
            if isinstance(found, bool) or not isinstance(found, (int, str)) or found == "":
                raise ValueError(f"the record has no message id in {self.message_id!r}")
            message_id = str(found)
        if content_type is None and message_id is None and not self.headers:
            return body
        return Message(body, content_type=content_type, message_id=message_id, headers=dict(self.headers) or None)


class RecordSource:
    """Opens a file, and reads its records lazily. The end of the `with` block closes the file.

    Args:
        file: path of the file; ``-`` for `standard_input`. This class decompresses a ``.gz`` file, and a ``.zip`` file
            that contains one file.
        format: format of the records; ``None`` to derive the format from the ending of the file name.
        standard_input: stream to read if `file` is ``-``; ``None`` if standard input is closed.
        reading: how records are converted to messages.

    Raises:
        OSError: the file cannot be opened.
        CommandError: a compressed file is unusable, standard input is closed, or `reading` sets `message_id` for lines.
    """

    def __init__(
        self, file: str, format: Format | None, standard_input: IO[bytes] | None, reading: Reading | None = None
    ) -> None:
        self._reading = reading or Reading()
        #: Name of the file or of standard input, for error texts and the display.
        self.name = "standard input" if file == "-" else file
        #: Size of the file on disk in bytes, before decompression; ``None`` for standard input and pipes.
        self.size: int | None = None
        self._stack = ExitStack()
        # The file on disk, before decompression; None for standard input.
        self._stored: IO[bytes] | None = None
        # Number of the last record before the current position; 0 at the start of the file.
        self._number = 0
        # The column names of a CSV file if `resume` has read them; otherwise `_read_csv` reads them.
        self._names: list[str] = []
        inner = file
        if file == "-":
            if standard_input is None:
                raise CommandError("standard input is closed; give a FILE")
            self._content = standard_input
            if isinstance(standard_input, io.BufferedReader):
                self._content = io.BufferedReader(_Waiting(standard_input.raw))
        else:
            path = Path(file)
            self._stored = self._stack.enter_context(path.open("rb"))
            if self._stored.seekable():
                self.size = path.stat().st_size
            self._content = self._stored
            ending = path.suffix.lower()
            if ending == ".gz" and self.size == 0:
                self._stack.close()
                raise CommandError(f"{self.name}: the file is empty, but a .gz file never is; copy it again")
            if ending == ".gz":
                self._content = cast("IO[bytes]", self._stack.enter_context(gzip.GzipFile(fileobj=self._stored)))
            elif ending == ".zip":
                inner = self._open_archive(self._stored)
        self.format = format or Format.of(inner)
        if self.format is Format.LINES and self._reading.message_id is not None:
            self._stack.close()
            raise CommandError("--message-id needs the format csv or jsonl; lines have no columns", ExitCode.USAGE)
        self._lines = _Lines(self.name, self._content)

    def _open_archive(self, stored: IO[bytes]) -> str:
        try:
            archive = self._stack.enter_context(zipfile.ZipFile(stored))
            names = [info.filename for info in archive.infolist() if not info.is_dir()]
            if len(names) != 1:
                raise CommandError(f"{self.name}: a .zip file must contain one file; this one contains {len(names)}")
            self._content = self._stack.enter_context(archive.open(names[0]))
        except CommandError:
            self._stack.close()
            raise
        except (zipfile.BadZipFile, RuntimeError) as error:
            # zipfile raises RuntimeError if the file is encrypted, or if its compression method is unknown.
            self._stack.close()
            raise CommandError(f"{self.name}: {error}") from error
        return names[0]

    @property
    def position(self) -> int:
        """How many bytes of the file on disk have been read; 0 if `size` is None or the file is closed."""
        return 0 if self.size is None or self._stored is None or self._stored.closed else self._stored.tell()

    @property
    def can_resume(self) -> bool:
        """Whether `resume` can be called. Standard input and pipes can only be read from the start."""
        return self.size is not None

    @property
    def place(self) -> Place:
        """The end of the last record that was read."""
        lines = self._lines
        return Place(self._number, lines.number, lines.offset, len(lines.last), zlib.crc32(lines.last))

    def resume(self, place: Place) -> None:
        """Skip all records up to `place`, which an earlier run has stored. Call this before the first record is read.

        Raises:
            CommandError: the file has changed since the earlier run, or cannot be read.
        """
        if not place.number:
            return
        content = self._content
        try:
            if self.format is Format.CSV:
                lines = _Lines(self.name, content)
                self._names = self._read_names(self._rows(lines), lines)
            content.seek(place.offset - place.last_line)
            last_line = content.read(place.last_line)
            grown = b"" if last_line.endswith(b"\n") else content.readline()
        except (EOFError, OSError, ValueError, zipfile.BadZipFile, zlib.error) as error:
            raise CommandError(f"{self.name}: cannot continue after record {place.number}: {error}") from error
        if len(last_line) < place.last_line:
            raise CommandError(f"{self.name}: the file has become shorter: an earlier run sent record {place.number}")
        if zlib.crc32(last_line) != place.checksum:
            raise CommandError(
                f"{self.name}: the file has changed: record {place.number} is not the record that an earlier run sent"
            )
        if grown.strip(b"\r\n"):
            raise CommandError(f"{self.name}: record {place.number} has become longer since it was sent")
        self._number = place.number
        self._lines = _Lines(self.name, content, place.line, place.offset + len(grown), last_line + grown)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    def __iter__(self) -> Iterator[Record]:
        """Yield the records in order. Raise `BadRecord` at the first record that cannot be read."""
        readers: dict[Format, Callable[[], Iterator[tuple[int, bytes | Message]]]] = {
            Format.LINES: self._read_lines,
            Format.CSV: self._read_csv,
            Format.JSONL: self._read_jsonl,
        }
        try:
            for line, message in readers[self.format]():
                self._number += 1
                yield Record(self._number, line, message)
        except (EOFError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error) as error:
            raise BadRecord(f"{self.name}: the compressed data is damaged: {error}") from error
        except OSError as error:
            raise BadRecord(f"{self.name}: cannot read further: {error.strerror or error}") from error

    # For each record, `_read_lines`, `_read_jsonl` and `_read_csv` yield the number of its last line, and its message.

    def _message(self, body: bytes, content_type: str | None, values: object) -> bytes | Message:
        try:
            return self._reading.message(body, content_type, values)
        except ValueError as error:
            raise BadRecord(f"{self.name}, line {self._lines.number}: {error}") from error

    def _read_lines(self) -> Iterator[tuple[int, bytes | Message]]:
        lines = self._lines
        for line in lines:
            yield lines.number, self._message(_without_end(line), None, None)

    def _read_jsonl(self) -> Iterator[tuple[int, bytes | Message]]:
        lines = self._lines
        for line in lines:
            text = line.strip()
            if lines.number == 1:
                text = text.removeprefix(b"\xef\xbb\xbf")
            if not text:
                continue
            try:
                values = json.loads(text.decode(), parse_constant=_refuse_constant)
            except (ValueError, RecursionError) as error:
                raise BadRecord(f"{self.name}, line {lines.number}: not valid JSON: {error}") from error
            yield lines.number, self._message(text, _JSON, values)

    def _read_csv(self) -> Iterator[tuple[int, bytes | Message]]:
        encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
        lines = self._lines
        rows = self._rows(lines)
        names = self._names or self._read_names(rows, lines)
        for row in rows:
            if len(row) != len(names):
                raise BadRecord(
                    f"{self.name}, line {lines.number}: {len(row)} fields, but the first row has {len(names)}"
                )
            values = dict(zip(names, row, strict=True))
            yield lines.number, self._message(encode(values).encode(), _JSON, values)

    def _rows(self, lines: _Lines) -> Iterator[list[str]]:
        """Yield the rows of a CSV file, including the first row with the column names. Skip empty rows."""
        # Allow fields as large as a line. The module `csv` has only one limit for the whole process.
        csv.field_size_limit(MAX_LINE)
        try:
            decoded = map(partial(lines.decode, encoding=self._reading.encoding), lines)
            yield from filter(None, csv.reader(decoded, delimiter=self._reading.delimiter, strict=True))
        except (csv.Error, UnicodeDecodeError) as error:
            raise BadRecord(f"{self.name}, line {lines.number}: not valid CSV: {error}") from error

    def _read_names(self, rows: Iterator[list[str]], lines: _Lines) -> list[str]:
        names = next(rows, [])
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise BadRecord(f"{self.name}, line {lines.number}: two columns are named {', '.join(map(repr, twice))}")
        return names


class _Waiting(io.RawIOBase):
    """Waits for the bytes of a stream that is non-blocking, such as standard input after some programs have used it.

    Without the wait, a pause in the input would look like its end.
    """

    def __init__(self, raw: io.RawIOBase) -> None:
        self._raw = raw

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while (number := self._raw.readinto(buffer)) is None:
            select.select([self._raw], [], [])
        return number


class _Lines:
    """Yields and counts the lines of a file. `number`, `offset` and `last` describe the line before `content`."""

    def __init__(self, name: str, content: IO[bytes], number: int = 0, offset: int = 0, last: bytes = b"") -> None:
        self._name = name
        # Read up to one byte more than the maximum, so that `__next__` can detect a line that is too long.
        self._content = iter(partial(content.readline, MAX_LINE + 1), b"")
        #: Number of the last line that was read.
        self.number = number
        #: Number of bytes up to the end of the last line that was read.
        self.offset = offset
        #: The last line that was read, including its line end.
        self.last = last

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> bytes:
        line = next(self._content)
        if self.last and not self.last.endswith(b"\n"):
            raise BadRecord(
                f"{self._name}, line {self.number}: this is the rest of a line whose beginning was read as a record"
            )
        self.last = line
        self.number += 1
        self.offset += len(line)
        if len(line) > MAX_LINE:
            raise BadRecord(
                f"{self._name}, line {self.number}: longer than {MAX_LINE:,} bytes, the maximum of a record"
            )
        return line

    def decode(self, line: bytes, encoding: str = "utf-8") -> str:
        # A file in UTF-8 may start with a byte order mark. `lookup` knows all names of UTF-8, such as ``utf8``.
        has_mark = self.number == 1 and codecs.lookup(encoding).name == "utf-8"
        return line.decode("utf-8-sig" if has_mark else encoding)


def _without_end(line: bytes) -> bytes:
    if line.endswith(b"\r\n"):
        return line[:-2]
    return line[:-1] if line.endswith(b"\n") else line


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")
