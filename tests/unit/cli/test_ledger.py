from __future__ import annotations

import zlib

import pytest

from qflow_client.cli.demo.actors import Ledger
from qflow_client.cli.demo.audit import ConsumerTally


def tally(ids: list[str | None], messages: int = 3) -> ConsumerTally:
    ledger = Ledger(messages)
    for message_id in ids:
        ledger.enter(message_id, b"")
    return ledger.report(last=True)


def test_the_ledger_counts_no_fault_if_each_message_was_received_exactly_once_in_any_order() -> None:
    assert tally(["flight-3", "flight-1", "flight-2"]) == ConsumerTally(consumed=3)


def test_the_ledger_counts_a_missing_and_a_repeated_message_even_if_the_totals_agree() -> None:
    assert tally(["flight-1", "flight-3", "flight-3"]) == ConsumerTally(consumed=3, repeated=1, missing=1)


def test_the_ledger_counts_every_repeated_copy_of_a_message() -> None:
    assert tally(["flight-1", "flight-2", "flight-3", *["flight-2"] * 300]).repeated == 300


@pytest.mark.parametrize("stranger", ["flight-0", "flight-4", "flight--1", "flight-x", "flight-²", "flight-", "", None])
def test_the_ledger_counts_a_received_message_that_was_never_sent_as_unknown(stranger: str | None) -> None:
    assert tally(["flight-1", "flight-2", "flight-3", stranger]) == ConsumerTally(consumed=4, unknown=1)


def test_the_ledger_counts_a_message_that_may_still_arrive_as_missing_only_at_the_end() -> None:
    ledger = Ledger(3)
    ledger.enter("flight-2", b"body")
    assert ledger.report(last=False) == ConsumerTally(consumed=1, checksum=zlib.crc32(b"body"))
    assert ledger.report(last=True).missing == 2


def test_the_checksum_of_the_received_bodies_does_not_depend_on_their_order() -> None:
    there, back = Ledger(2), Ledger(2)
    for ledger, order in ((there, (1, 2)), (back, (2, 1))):
        for number in order:
            ledger.enter(f"flight-{number}", b"%d" % number)
    assert there.report(last=True) == back.report(last=True)
    assert there.report(last=True).checksum == zlib.crc32(b"1") + zlib.crc32(b"2")
