from __future__ import annotations

from collections.abc import Callable

import pytest

from qflow_client import (
    Message,
    MessageNacked,
    MessageRejected,
    MessageReturned,
    Outcome,
    OutcomeUnknown,
    Producer,
    ProducerClosed,
    Receipt,
    UndeliveredMessages,
)
from qflow_client.broker import Broker
from qflow_client.logs import flush_logs
from qflow_client.message import REPUBLISHED
from tests.effort import rounds

from .tools import PATIENCE, Growing, Wire, bodies, eventually, send_unconfirmed, start, takes, wait_done, wait_in_line


def test_an_unroutable_mandatory_message_is_returned(producer: Producer) -> None:
    receipt = producer.send(b"lost", routing_key="nowhere")
    with pytest.raises(MessageReturned, match="312") as caught:
        receipt.result(timeout=20)
    assert receipt.outcome is Outcome.RETURNED
    assert caught.value.receipt is receipt
    assert caught.value.reply_code == 312
    assert caught.value.reply_text
    assert not receipt.delivered
    assert not receipt.may_have_arrived


def test_basic_returns_are_attributed_to_their_messages(producer: Producer, broker: Broker) -> None:
    receipts = []
    for number in range(300):
        key = "nowhere" if number % 7 == 0 else "q"
        message: bytes | Message = b"%d" % number
        if number % 5 == 0:
            message = Message(b"%d" % number, message_id=f"own {number}")
        elif number % 3 == 0:
            message = Message(b"%d" % number + bytes(200_000 if number % 9 == 0 else 0), headers={"n": number})
        receipts.append(producer.send(message, routing_key=key))
    with pytest.raises(UndeliveredMessages) as caught:
        producer.flush(timeout=20)
    returned = [receipt for number, receipt in enumerate(receipts) if number % 7 == 0]
    assert list(caught.value.receipts) == returned
    assert [receipt.outcome for receipt in returned] == [Outcome.RETURNED] * len(returned)
    assert {receipt.outcome for receipt in receipts if receipt not in returned} == {Outcome.CONFIRMED}
    assert [message.message_id for message in caught.value.unsent] == [receipt.message_id for receipt in returned]
    assert caught.value.unknown == ()
    assert broker.queue("q").depth == 300 - len(returned)


def test_without_mandatory_an_unroutable_message_is_dropped_and_confirmed(
    make_producer: Callable[..., Producer],
) -> None:
    producer = make_producer(mandatory=False)
    assert producer.send(b"", routing_key="nowhere").result(timeout=20) is Outcome.CONFIRMED


def test_without_confirms_flush_raises_an_error_for_a_returned_message(make_producer: Callable[..., Producer]) -> None:
    producer = make_producer(confirms=False)
    receipt = producer.send(b"lost", routing_key="nowhere")
    assert receipt.result(timeout=20) is Outcome.SENT
    eventually(lambda: producer._protocol.reports.failures)
    with pytest.raises(UndeliveredMessages, match="312") as caught:
        producer.flush(timeout=20)
    assert [message.body for message in caught.value.unsent] == [b"lost"]


@pytest.mark.parametrize("end", ["flush", "close"])
def test_without_confirms_on_delivery_is_called_once_for_a_returned_message(
    make_producer: Callable[..., Producer], end: str
) -> None:
    told = Growing()
    producer = make_producer(confirms=False, on_delivery=told.append)
    producer.send(b"lost", routing_key="nowhere")
    eventually(lambda: producer._protocol.reports.failures)
    with pytest.raises(UndeliveredMessages, match="312"):
        getattr(producer, end)(timeout=20)
    producer.close()
    assert [receipt.outcome for receipt in told] == [Outcome.SENT]


@pytest.mark.usefixtures("no_retries")
def test_the_receipt_of_a_nacked_message_shows_that_it_was_not_delivered_and_the_producer_continues(
    producer: Producer, broker: Broker
) -> None:
    assert producer.send(b"1").result(timeout=20) is Outcome.CONFIRMED
    broker.nack_publishes()
    receipts = [producer.send(b"no") for _ in range(100)]
    for receipt in receipts:
        with pytest.raises(MessageNacked):
            receipt.result(timeout=20)
    assert receipts[0].outcome is Outcome.NACKED
    broker.nack_publishes(False)
    assert producer.send(b"2").result(timeout=20) is Outcome.CONFIRMED
    # All failures were looked at.
    producer.flush(timeout=20)
    assert bodies(broker) == [b"1", b"2"]
    assert producer.unsettled == 0


@pytest.mark.usefixtures("no_retries")
@pytest.mark.parametrize("end", ["flush", "close"])
def test_E6_failures_of_messages_beyond_the_limit_are_dropped_and_counted_if_nobody_reads_them(
    make_producer: Callable[..., Producer], broker: Broker, caplog: pytest.LogCaptureFixture, end: str
) -> None:
    producer = make_producer(max_failed_bytes=20_000, capacity=1)
    broker.nack_publishes()
    for number in range(100):
        producer.send(b"%01000d" % number)
    eventually(lambda: producer.unsettled == 0)
    with pytest.raises(
        UndeliveredMessages, match=r"100 admitted messages .* without receipts, because max_failed_bytes was reached"
    ) as caught:
        getattr(producer, end)(timeout=20)
    kept = [int(message.body) for message in caught.value.unknown]
    assert kept == list(range(100 - len(kept), 100))
    assert 5 < len(kept) <= 13
    assert caught.value.dropped == 100 - len(kept)
    assert flush_logs(PATIENCE)
    assert caplog.text.count("max_failed_bytes=20000") == 1
    producer.close(timeout=20)


def test_a_message_alone_in_flight_when_a_publish_closes_the_channel_is_rejected(
    producer: Producer, broker: Broker, wire: Wire
) -> None:
    assert producer.send(b"fine").result(timeout=20) is Outcome.CONFIRMED
    receipt = producer.send(b"bad", exchange="no such exchange")
    with pytest.raises(MessageRejected, match="no such exchange") as caught:
        receipt.result(timeout=20)
    assert caught.value.reply_code == 404
    assert "no such exchange" in caught.value.reply_text
    assert producer.send(b"later", timeout=20).result(timeout=20) is Outcome.CONFIRMED
    producer.close()
    assert bodies(broker) == [b"fine", b"later"]
    assert wire.count("in", "Connection.Open") == 1


@pytest.mark.parametrize("place", [0, 150, 299])
def test_of_hundreds_of_messages_only_the_one_at_which_the_broker_closes_the_channel_is_rejected(
    producer: Producer, broker: Broker, place: int
) -> None:
    receipts = []
    for number in range(300):
        exchange = "no such exchange" if number == place else ""
        receipts.append(producer.send(b"%d" % number, exchange=exchange, timeout=None))
    poison = receipts.pop(place)
    with pytest.raises(MessageRejected, match=r"404 .*no such exchange"):
        poison.result(timeout=20)
    producer.flush(timeout=20)
    assert {receipt.outcome for receipt in receipts} == {Outcome.CONFIRMED}
    firsts = list(dict.fromkeys(bodies(broker)))
    assert firsts == [b"%d" % number for number in range(300) if number != place]
    seen = set()
    for message in broker.messages("q"):
        marked = bool((message.properties.headers or {}).get(REPUBLISHED))
        assert marked or message.body not in seen
        seen.add(message.body)
    assert producer.wait_unflowed(timeout=20)


def test_many_messages_at_which_the_broker_closes_the_channel_are_rejected_one_by_one(
    producer: Producer, broker: Broker
) -> None:
    receipts = [
        producer.send(b"%d" % number, exchange=f"none {number}" if number % 3 else "", timeout=None)
        for number in range(60)
    ]
    wait_done(receipts)
    assert [receipt.outcome is Outcome.REJECTED for receipt in receipts] == [bool(n % 3) for n in range(60)]
    assert list(dict.fromkeys(bodies(broker))) == [b"%d" % number for number in range(0, 60, 3)]
    # All failures were looked at.
    producer.flush(timeout=20)


def test_a_producer_reopens_a_channel_that_an_operator_closed(producer: Producer, broker: Broker) -> None:
    (receipt,) = send_unconfirmed(producer, broker, b"1")
    broker.close_channels()
    broker.release_confirms()
    assert receipt.result(timeout=20) is Outcome.CONFIRMED
    assert bodies(broker) == [b"1", b"1"]


@pytest.mark.parametrize("how", ["drop_connections", "close_connections"])
@pytest.mark.usefixtures("one_connection")
def test_a_lost_connection_settles_all_messages_and_wakes_all_waiters(
    make_producer: Callable[..., Producer], broker: Broker, how: str
) -> None:
    producer = make_producer(capacity=4)
    assert producer.send(b"before").result(timeout=20) is Outcome.CONFIRMED
    receipts = send_unconfirmed(producer, broker, b"0", b"1", b"2", b"3")
    waiting = [start(producer.send, b"waits %d" % number, timeout=None) for number in range(5)]
    wait_in_line(producer, 5)
    others = [
        start(producer.wait_unflowed),
        start(producer.flush, timeout=None),
        start(receipts[0].result, timeout=None),
    ]
    eventually(
        lambda: producer._protocol.waiters.unflowed and producer._protocol.waiters.settled and receipts[0]._waiter
    )
    with takes(0.0):
        getattr(broker, how)()
        errors = [job.wait() for job in waiting]
        unflowed, flushed, result = (job.wait() for job in others)
    assert [type(error) for error in errors] == [ProducerClosed] * 5
    assert sorted(error.message for error in errors if isinstance(error, ProducerClosed)) == [
        b"waits %d" % number for number in range(5)
    ]
    assert isinstance(unflowed, ProducerClosed)
    assert isinstance(result, OutcomeUnknown)
    assert str(producer.flow_state.closed) in str(result)
    assert isinstance(flushed, UndeliveredMessages)
    assert {receipt.outcome for receipt in receipts} == {Outcome.UNKNOWN}
    with takes(0.0), pytest.raises(ProducerClosed):
        producer.send(b"after", timeout=20)
    with pytest.raises(ProducerClosed):
        producer.send_nowait(b"after")
    assert producer.flow_state.holds[0].kind == "disconnected"
    assert bodies(broker) == [b"before", *(b"%d" % number for number in range(4))]


@pytest.mark.usefixtures("one_connection")
def test_after_a_connection_is_cut_in_a_burst_the_outcomes_show_which_messages_may_have_arrived(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    producer = make_producer(capacity=5000)

    def work(thread: int) -> list[Receipt]:
        receipts: list[Receipt] = []
        try:
            for number in range(100_000):
                receipts.append(producer.send(b"%d %d" % (thread, number)))
        except ProducerClosed:
            pass
        return receipts

    jobs = [start(work, thread) for thread in range(4)]
    broker.wait_until(lambda b: b.queue("q").published > rounds(2000, least=500))
    broker.drop_connections()
    receipts = [receipt for job in jobs for receipt in job.result()]
    wait_done(receipts)
    arrived = {str(message.properties.message_id) for message in broker.messages("q")}
    assert len(arrived) == broker.queue("q").depth
    confirmed = {receipt.message_id for receipt in receipts if receipt.outcome is Outcome.CONFIRMED}
    may_have = {receipt.message_id for receipt in receipts if receipt.may_have_arrived}
    assert confirmed <= arrived <= may_have
    assert {receipt.outcome for receipt in receipts} <= {Outcome.CONFIRMED, Outcome.UNKNOWN, Outcome.FAILED}


@pytest.mark.parametrize("look", ["result", "error", "outcome", "delivered"])
def test_failures_of_messages_that_the_program_has_read_are_not_raised_again(producer: Producer, look: str) -> None:
    seen, unseen = (producer.send(b"%d" % number, routing_key="nowhere") for number in range(2))
    if look == "result":
        with pytest.raises(MessageReturned):
            seen.result(timeout=20)
    else:
        assert seen.wait(timeout=20)
        found = seen.error() if look == "error" else getattr(seen, look)
        assert isinstance(found, MessageReturned) or found == (Outcome.RETURNED if look == "outcome" else False)
    assert unseen.wait(timeout=20)
    assert "returned" in repr(unseen)
    with pytest.raises(UndeliveredMessages) as caught:
        producer.flush(timeout=20)
    assert caught.value.receipts == (unseen,)
    # And once told, that is enough.
    producer.flush(timeout=20)
    producer.close()


def test_failures_of_messages_that_the_program_has_not_read_are_raised_by_close(producer: Producer) -> None:
    receipt = producer.send(b"lost", routing_key="nowhere")
    with pytest.raises(UndeliveredMessages, match="1 safe to send again") as caught:
        producer.close()
    assert caught.value.receipts == (receipt,)
    assert [message.body for message in caught.value.unsent] == [b"lost"]
    assert caught.value.unknown == ()


@pytest.mark.usefixtures("no_retries")
def test_undelivered_messages_in_an_error_can_be_sent_again(
    make_producer: Callable[..., Producer], broker: Broker
) -> None:
    producer = make_producer()
    broker.nack_publishes()
    for number in range(5):
        producer.send(Message(b"%d" % number, type="order"))
    with pytest.raises(UndeliveredMessages) as caught:
        producer.flush(timeout=20)
    broker.nack_publishes(False)
    # A nack is one queue's word, so a copy may be in another.
    assert caught.value.unsent == ()
    for message in caught.value.unknown:
        producer.send(message)
    producer.flush(timeout=20)
    assert bodies(broker) == [b"%d" % number for number in range(5)]
