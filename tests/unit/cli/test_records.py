from __future__ import annotations

import errno
import gzip
import io
import json
import os
import threading
import zipfile
from pathlib import Path

import pytest

import qflow_client.cli.records
from qflow_client import Message, Position
from qflow_client.cli.errors import CommandError
from qflow_client.cli.records import BadRecord, Format, Place, Reading, Record, RecordSource
from qflow_client.cli.resuming import Reached, source_of


def read(content: bytes, format: Format) -> list[Record]:
    with RecordSource("-", format, io.BytesIO(content)) as source:
        return list(source)


def bodies(content: bytes, format: Format) -> list[bytes]:
    return [r.message.body if isinstance(r.message, Message) else r.message for r in read(content, format)]


def write(path: Path, content: bytes) -> Path:
    """Write a file, compressed as its extension says, and return its path."""
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(content))
    elif path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("folder/inside.csv", content)
    else:
        path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("a.csv", Format.CSV),
        ("a.CSV", Format.CSV),
        ("a.csv.gz", Format.CSV),
        ("a.b.jsonl", Format.JSONL),
        ("a.ndjson.zip", Format.JSONL),
        ("a.txt", Format.LINES),
        ("a.gz", Format.LINES),
        ("csv", Format.LINES),
        ("-", Format.LINES),
    ],
)
def test_the_file_name_extension_decides_how_records_are_read(name: str, format: Format) -> None:
    assert Format.of(name) is format


def test_a_record_of_a_text_file_is_a_line_without_its_line_ending() -> None:
    assert bodies(b"one\ntwo\r\n\n\xff\xfe\nlast", Format.LINES) == [b"one", b"two", b"", b"\xff\xfe", b"last"]


@pytest.mark.parametrize(
    ("format", "content"),
    [(Format.LINES, b"12345678"), (Format.JSONL, b'"123456"'), (Format.CSV, b'"23456\n89"')],
)
def test_a_line_or_field_that_is_longer_than_the_maximum_ends_reading_with_an_error(
    monkeypatch: pytest.MonkeyPatch, format: Format, content: bytes
) -> None:
    monkeypatch.setattr(qflow_client.cli.records, "MAX_LINE", 7)
    start = b"a\n" if format is Format.CSV else b""
    assert len(read(start + content[:6] + b"\n", Format.LINES)) == start.count(b"\n") + 1
    with pytest.raises(BadRecord, match=r"line \d: (longer than 7 bytes, the maximum of a record|.*field larger)"):
        read(start + content + b"\n", format)


def test_an_empty_file_has_no_records() -> None:
    for format in Format:
        assert read(b"", format) == []


def test_a_csv_record_is_a_json_object_with_names_from_the_first_row() -> None:
    records = read('\ufeffa,b\n1,"x,\ny"\n\n2,ü\n'.encode(), Format.CSV)
    messages = [record.message for record in records]
    assert all(isinstance(m, Message) and m.content_type == "application/json" for m in messages)
    assert [json.loads(m.body) for m in messages if isinstance(m, Message)] == [
        {"a": "1", "b": "x,\ny"},
        {"a": "2", "b": "ü"},
    ]
    assert [(record.number, record.line) for record in records] == [(1, 3), (2, 5)]


@pytest.mark.parametrize("encoding", ["utf-8", "UTF-8", "utf8"])
def test_a_byte_order_mark_is_not_part_of_the_first_name_of_a_csv_file(encoding: str) -> None:
    file = io.BytesIO("\ufeffid,b\n7,x\n".encode())
    with RecordSource("-", Format.CSV, file, Reading(encoding=encoding, message_id="id")) as source:
        (record,) = source
    assert isinstance(record.message, Message)
    assert (record.message.message_id, json.loads(record.message.body)) == ("7", {"id": "7", "b": "x"})


def test_a_line_of_a_json_lines_file_is_sent_unchanged_and_blank_lines_are_skipped() -> None:
    content = b'\xef\xbb\xbf{"a": 1}\n\n  [2]  \r\n"three"'
    assert bodies(content, Format.JSONL) == [b'{"a": 1}', b"[2]", b'"three"']
    assert [record.line for record in read(content, Format.JSONL)] == [1, 3, 4]


@pytest.mark.parametrize(
    ("content", "format", "line", "words", "before"),
    [
        (b'{"a":1}\n{"a":', Format.JSONL, 2, "not valid JSON", 1),
        (b"[NaN]\n", Format.JSONL, 1, "NaN is not a JSON value", 0),
        (b'1\n"\xff"\n', Format.JSONL, 2, "not valid JSON: 'utf-8' codec", 1),
        (b"[" * 100_000, Format.JSONL, 1, "not valid JSON", 0),
        (b"a,b\n1,2\n3\n", Format.CSV, 3, "1 fields, but the first row has 2", 1),
        (b"a,b\n1,2,3\n", Format.CSV, 2, "3 fields, but the first row has 2", 0),
        (b"a,a\n1,2\n", Format.CSV, 1, "two columns are named 'a'", 0),
        (b"a,b\n1,2\n\xff,3\n", Format.CSV, 3, "not valid CSV: 'utf-8' codec", 1),
        (b'a,b\n1,"2\n', Format.CSV, 2, "not valid CSV: unexpected end of data", 0),
    ],
)
def test_an_invalid_record_raises_an_error_that_names_file_and_line(
    content: bytes, format: Format, line: int, words: str, before: int
) -> None:
    with RecordSource("-", format, io.BytesIO(content)) as source:
        records = iter(source)
        for _ in range(before):
            next(records)
        with pytest.raises(BadRecord) as caught:
            next(records)
    assert str(caught.value).startswith(f"standard input, line {line}: ")
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["plain.csv", "packed.csv.gz", "packed.zip"])
def test_compressed_files_are_decompressed_by_extension_and_report_how_much_was_read(tmp_path: Path, name: str) -> None:
    content = b"n\n" + b"".join(b"%d\n" % n for n in range(1000))
    path = write(tmp_path / name, content)
    with RecordSource(str(path), None, io.BytesIO()) as source:
        assert source.size == path.stat().st_size
        records = list(source)
        assert 0 < source.position <= source.size
    assert [record.number for record in records] == list(range(1, 1001))
    assert source.position == 0


def test_a_zip_archive_with_more_than_one_file_raises_an_error(tmp_path: Path) -> None:
    path = tmp_path / "two.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.csv", "")
        archive.writestr("b.csv", "")
    with pytest.raises(CommandError, match="must contain one file; this one contains 2"):
        RecordSource(str(path), None, io.BytesIO())


def test_a_file_that_is_no_archive_despite_its_extension_raises_an_error(tmp_path: Path) -> None:
    path = tmp_path / "no.zip"
    path.write_bytes(b"a,b\n")
    with pytest.raises(CommandError, match=r"no\.zip: File is not a zip file"):
        RecordSource(str(path), None, io.BytesIO())


@pytest.mark.parametrize("damaged", [b"plain text\n", gzip.compress(b"x\n" * 10_000)[:-9]], ids=["plain", "cut"])
def test_damaged_compressed_data_raises_an_error_that_names_the_file(tmp_path: Path, damaged: bytes) -> None:
    path = tmp_path / "damaged.gz"
    path.write_bytes(damaged)
    with (
        RecordSource(str(path), None, io.BytesIO()) as source,
        pytest.raises(BadRecord, match=r"damaged\.gz: the compressed data is damaged"),
    ):
        list(source)


def test_an_empty_gz_file_raises_an_error_because_its_copy_has_failed(tmp_path: Path) -> None:
    path = tmp_path / "empty.gz"
    path.touch()
    with pytest.raises(CommandError, match=r"empty\.gz: the file is empty"):
        RecordSource(str(path), None, io.BytesIO())


def test_a_field_of_a_csv_file_may_be_as_long_as_a_message() -> None:
    (body,) = bodies(b"a\n" + b"x" * 200_000 + b"\n", Format.CSV)
    assert len(body) == 200_000 + len('{"a":""}')


def test_a_read_error_in_a_file_is_reported_after_the_records_before_it() -> None:
    class Failing(io.BytesIO):
        def readline(self, size: int | None = -1, /) -> bytes:
            line = super().readline(size)
            if not line:
                raise OSError(errno.EIO, "Input/output error")
            return line

    with RecordSource("-", None, Failing(b"one\n")) as source:
        records = iter(source)
        assert next(records).message == b"one"
        with pytest.raises(BadRecord, match="standard input: cannot read further: Input/output error"):
            next(records)


def test_reading_records_from_a_closed_standard_input_raises_an_error() -> None:
    with pytest.raises(CommandError, match="standard input is closed; give a FILE"):
        RecordSource("-", None, None)


def test_a_pause_in_a_non_blocking_standard_input_is_not_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    pieces = iter([b"on", b"e\ntw", b"o"])

    def next_piece(*_: object) -> None:
        if piece := next(pieces, b""):
            os.write(writer, piece)
        else:
            os.close(writer)

    monkeypatch.setattr("qflow_client.cli.records.select.select", next_piece)
    with os.fdopen(reader, "rb") as standard_input, RecordSource("-", None, standard_input) as source:
        assert [record.message for record in source] == [b"one", b"two"]


def test_the_rest_of_a_line_that_was_read_before_its_end_was_written_is_no_record(tmp_path: Path) -> None:
    path = write(tmp_path / "growing.txt", b"one\ntw")
    with RecordSource(str(path), None, None) as source:
        records = iter(source)
        assert [next(records).message, next(records).message] == [b"one", b"tw"]
        write(path, b"one\ntwo\nthree\n")
        with pytest.raises(BadRecord, match=r"growing\.txt, line 2: this is the rest of a line whose"):
            next(records)


def test_reading_records_from_a_named_pipe_reports_no_progress(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(b"one\n",))
    writer.start()
    with RecordSource(str(path), None, io.BytesIO()) as source:
        assert [record.message for record in source] == [b"one"]
        assert (source.size, source.position) == (None, 0)
    writer.join()


@pytest.mark.parametrize(
    ("offset", "value", "words"), [(6, 1, "is encrypted"), (8, 99, "compression method is not supported")]
)
def test_an_archive_that_cannot_be_opened_raises_an_error(tmp_path: Path, offset: int, value: int, words: str) -> None:
    path = tmp_path / "locked.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.csv", "a\n1\n")
    content = bytearray(path.read_bytes())
    # The flags and the method stand at these places of the file's header, and two behind them in the directory.
    content[offset] = content[content.index(b"PK\1\2") + offset + 2] = value
    path.write_bytes(content)
    with pytest.raises(CommandError, match=words):
        RecordSource(str(path), None, io.BytesIO())


# Resuming after a record (E13).

RECORDS = {
    Format.LINES: b"one\n\ntwo\r\nthree\nfour",
    Format.JSONL: b'\xef\xbb\xbf{"n": 1}\n\n  {"n": 2}\n{"n": 3}\r\n\n',
    Format.CSV: b'\xef\xbb\xbfn,name\n\n1,"A\n\n\xc3\xa5se"\n\n2,"Bo, the\nsecond"\r\n3,C\n',
}


def resumed(path: Path, format: Format, place: Place) -> list[Record]:
    with RecordSource(str(path), format, None) as source:
        source.resume(place)
        assert source.place.number == place.number
        return list(source)


@pytest.mark.parametrize("ending", ["txt", "gz", "zip"])
@pytest.mark.parametrize("format", Format, ids=str)
def test_E13_reading_a_file_of_records_can_resume_after_any_record(tmp_path: Path, format: Format, ending: str) -> None:
    path = write(tmp_path / f"records.{ending}", RECORDS[format])
    with RecordSource(str(path), format, None) as source:
        assert source.can_resume
        places = [source.place, *(source.place for _ in source)]
    with RecordSource(str(path), format, None) as source:
        records = list(source)
    assert len(records) >= 3
    assert [place.number for place in places] == list(range(len(records) + 1))
    for place in places:
        assert resumed(path, format, place) == records[place.number :]
        assert Reached.parse(str(Reached(format, place, 7)), format, "x") == Reached(format, place, 7)


def place_behind(path: Path, number: int) -> Place:
    with RecordSource(str(path), None, None) as source:
        return next(source.place for record in source if record.number == number)


def test_E13_reading_resumes_in_a_file_to_which_records_were_appended(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"one\ntwo")
    place = place_behind(path, 2)
    for more in (b"\nthree", b"\r\nthree"):
        write(path, b"one\ntwo" + more)
        assert resumed(path, Format.LINES, place) == [Record(3, 3, b"three")]
    write(path, b"one\ntwo\n")
    assert resumed(path, Format.LINES, place) == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"one\n", r"a\.txt: the file has become shorter: an earlier run sent record 2"),
        (b"", r"a\.txt: the file has become shorter: an earlier run sent record 2"),
        (b"one\nTwo\nthree\n", r"a\.txt: the file has changed: record 2 is not the record that an earlier run sent"),
        (b"one\ntwofold\n", r"a\.txt: record 2 has become longer since it was sent"),
    ],
    ids=["shorter", "empty", "changed", "longer"],
)
def test_E13_reading_does_not_resume_in_a_file_whose_content_has_changed(
    tmp_path: Path, content: bytes, words: str
) -> None:
    path = write(tmp_path / "a.txt", b"one\ntwo")
    place = place_behind(path, 2)
    write(path, content)
    with pytest.raises(CommandError, match=words):
        resumed(path, Format.LINES, place)


def test_E13_reading_does_not_resume_in_a_file_that_can_no_longer_be_decompressed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gz", b"one\ntwo\n")
    place = place_behind(path, 2)
    path.write_bytes(b"plain")
    with pytest.raises(CommandError, match=r"a\.gz: cannot continue after record 2: Not a gzipped file"):
        resumed(path, Format.LINES, place)


def test_E13_reading_can_resume_only_in_a_regular_file() -> None:
    with RecordSource("-", None, io.BytesIO(b"one\n")) as source:
        assert not source.can_resume


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (7, "x: the position in the outbox is not one of qflow send: 7"),
        ("lines record=1", "x: the position in the outbox is not one of qflow send: 'lines record=1'"),
        (str(Reached(Format.CSV, Place())), "x: an earlier run sent the file in the format csv, not lines"),
    ],
    ids=["number", "text", "format"],
)
def test_E13_resuming_from_a_position_of_a_different_file_format_raises_an_error(text: int | str, words: str) -> None:
    with pytest.raises(CommandError) as refused:
        Reached.parse(text, Format.LINES, "x")
    assert str(refused.value) == words


def test_E13_the_stored_position_of_a_file_belongs_to_the_file_and_its_destination(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("a.csv")
    assert source_of("link", "", "orders") == source_of(str(tmp_path / "a.csv"), "", "orders")
    assert source_of("a.csv", "", "orders") == f"{tmp_path.resolve()}/a.csv to ''/'orders'"
    # A path that is not valid text.
    Position(source_of(os.fsdecode(b"a\xff.csv"), "", "orders"), 1)
