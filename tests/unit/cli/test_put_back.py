"""Where `qflow send` puts the position of a file back to, and when (E13)."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from qflow_client import ConfirmTimeout, OutboxError, Outcome
from qflow_client.cli.records import Format, Place, Record
from qflow_client.cli.resuming import Reached
from qflow_client.cli.send import Sending

LETTERS = {"c": Outcome.CONFIRMED, "f": Outcome.FAILED, "s": Outcome.STORED, "-": None}


class Receipt:
    """The fate of a message."""

    def __init__(self, letter: str) -> None:
        self.outcome = LETTERS[letter]

    @property
    def done(self) -> bool:
        return self.outcome is not None

    @property
    def delivered(self) -> bool:
        return self.outcome is Outcome.CONFIRMED

    @property
    def is_stored(self) -> bool:
        return self.outcome is Outcome.STORED

    def error(self) -> Exception | None:
        return None if self.delivered else OSError("refused")


class Producer:
    """Takes the positions that are written."""

    closed = False

    def __init__(self) -> None:
        self.written: list[str] = []
        self.disk_fails = False
        self.settings = SimpleNamespace(max_producer_flow_control_wait=None)
        #: What happens in each call of `flush` that does not see all messages settled.
        self.waits: list[Callable[[], object]] = []
        self._engine = SimpleNamespace(storage=SimpleNamespace(outbox=self))

    def flush(self, timeout: float | None) -> None:
        if self.waits:
            self.waits.pop(0)()
            raise ConfirmTimeout(f"after {timeout}", 3)

    def set_position(self, source: str, value: str, timeout: float) -> None:
        if self.disk_fails:
            raise OutboxError("disk full")
        self.written.append(f"{source} {Reached.parse(value, Format.LINES, source).place.number}")
        assert value.endswith("sent=5")


def start(letters: str) -> tuple[Sending, Producer, list[Receipt]]:
    producer: Any = Producer()
    sending = Sending(producer, source="file")
    sending.progress = Reached(Format.LINES, Place())
    receipts: Any = [Receipt(letter) for letter in letters]
    for number, receipt in enumerate(receipts, 1):
        sending._pending.append((Record(number, number, b""), receipt, Place(number, number)))
    return sending, producer, receipts


@pytest.mark.parametrize(
    ("letters", "failed", "written"),
    [
        ("-----", 0, []),
        ("cc-c-", 0, []),
        ("ccccc", 0, []),
        ("cfccc", 1, ["file 1"]),
        ("c-f-f", 1, ["file 2"]),
        ("----f", 1, ["file 4"]),
        ("f----", 1, ["file 0"]),
        ("fc-f-", 1, ["file 0"]),
    ],
)
def test_E13_it_is_put_back_to_before_the_first_record_that_is_known_to_be_refused(
    letters: str, failed: int, written: list[str]
) -> None:
    sending, producer, _ = start(letters)
    assert sending.account() == failed
    assert producer.written == written
    # It is written once.
    assert sending.account() == failed
    assert producer.written == written


def test_E13_it_is_put_back_further_if_an_earlier_record_is_refused_later() -> None:
    sending, producer, receipts = start("---f-")
    assert sending.account() == 1
    receipts[0].outcome = Outcome.CONFIRMED
    assert sending.account() == 1
    assert producer.written == ["file 3"]
    receipts[1].outcome = Outcome.FAILED
    assert sending.account() == 1
    assert producer.written == ["file 3", "file 1"]


def test_E13_a_disk_that_fails_is_tried_again_and_a_closed_producer_is_not_asked() -> None:
    sending, producer, receipts = start("-f---")
    producer.disk_fails = True
    assert sending.account() == 1
    producer.disk_fails = False
    assert sending.account() == 1
    assert producer.written == ["file 1"]
    producer.closed = True
    receipts[0].outcome = Outcome.FAILED
    assert sending.account() == 2
    assert producer.written == ["file 1"]


def test_E13_it_is_put_back_while_the_last_confirms_are_awaited() -> None:
    sending, producer, receipts = start("-----")
    seen: list[list[str]] = []

    def refuse() -> None:
        receipts[2].outcome = Outcome.FAILED

    producer.waits = [refuse, lambda: seen.append(producer.written.copy())]
    assert sending._flush() is None
    assert seen == [["file 2"]]


def test_E13_confirms_that_do_not_come_are_told_with_the_whole_time() -> None:
    sending, producer, _ = start("-----")
    producer.settings.max_producer_flow_control_wait = 0.12
    producer.waits = [bool] * 1_000_000
    assert str(sending._flush()) == "3 messages are not settled after 0.12 s"
