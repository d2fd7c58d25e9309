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


def test_a_run_that_receives_each_message_exactly_once_in_any_order_passes() -> None:
    assert tally(["flight-3", "flight-1", "flight-2"]) == ConsumerTally(consumed=3)


def test_a_gap_counts_as_missing_and_a_copy_counts_as_repeated_even_if_the_totals_agree() -> None:
    assert tally(["flight-1", "flight-3", "flight-3"]) == ConsumerTally(consumed=3, repeated=1, missing=1)


def test_every_copy_is_counted() -> None:
    assert tally(["flight-1", "flight-2", "flight-3", *["flight-2"] * 300]).repeated == 300


@pytest.mark.parametrize("stranger", ["flight-0", "flight-4", "flight--1", "flight-x", "flight-²", "flight-", "", None])
def test_a_message_that_was_never_sent_is_unknown(stranger: str | None) -> None:
    assert tally(["flight-1", "flight-2", "flight-3", stranger]) == ConsumerTally(consumed=4, unknown=1)


def test_a_message_that_may_still_arrive_is_not_missing_before_the_end() -> None:
    ledger = Ledger(3)
    ledger.enter("flight-2", b"body")
    assert ledger.report(last=False) == ConsumerTally(consumed=1, checksum=zlib.crc32(b"body"))
    assert ledger.report(last=True).missing == 2


def test_the_checksum_of_the_bodies_does_not_depend_on_their_order() -> None:
    there, back = Ledger(2), Ledger(2)
    for ledger, order in ((there, (1, 2)), (back, (2, 1))):
        for number in order:
            ledger.enter(f"flight-{number}", b"%d" % number)
    assert there.report(last=True) == back.report(last=True)
    assert there.report(last=True).checksum == zlib.crc32(b"1") + zlib.crc32(b"2")
