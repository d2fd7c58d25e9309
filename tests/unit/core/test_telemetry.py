"""The messages that the protocol reports, and the results of an observer; with a simulated clock, without an SDK."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from qflow_client import Message, Outcome, ProducerClosed, ProducerSettings, telemetry
from qflow_client.core.protocol import ProducerProtocol
from qflow_client.telemetry import Observer

from .support import CHANNEL, FRAME_MAX, drain, make, publish, returned, send, wait, write_and_ack


class Recorded(list[tuple[float, dict[str, Any]]]):
    """A histogram."""

    def record(self, seconds: float, attributes: dict[str, Any]) -> None:
        self.append((seconds, attributes))


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


def observe(protocol: ProducerProtocol, recorded: Recorded) -> Observer:
    observer = Observer(protocol, "orders", "amqps://broker.example/", recorded)  # type: ignore[arg-type]
    protocol.admission.observer = observer
    return observer


def seconds(recorded: Recorded) -> list[float]:
    return [each for each, _ in recorded]


def test_telemetry_records_one_duration_that_of_the_oldest_for_messages_settled_together(
    recorded: Recorded,
) -> None:
    protocol = make()
    observer = observe(protocol, recorded)
    for at in range(5):
        send(protocol, now=10.0 + at)
    write_and_ack(protocol, 3, 20.0, multiple=True)
    observer.record(now=20.0)
    assert seconds(recorded) == [10.0]
    protocol.on_ack(5, False, 21.0)
    observer.record(now=21.0)
    protocol.on_ack(4, False, 22.0)
    observer.record(now=22.0)
    assert seconds(recorded) == [10.0, 7.0, 9.0]
    assert observer.began == {}
    assert observer.counts == {("q", Outcome.CONFIRMED): 5}
    assert recorded[0][1] == {
        "messaging.system": "rabbitmq",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": "q",
        "server.address": "broker.example",
        "server.port": 5671,
        "qflow.producer.name": "orders",
    }


def test_telemetry_counts_each_message_once_even_if_it_is_resent_on_a_second_connection(recorded: Recorded) -> None:
    protocol = make()
    observer = observe(protocol, recorded)
    large = {"k": "v" * (FRAME_MAX - 200)}
    back = send(protocol, now=1.0)
    send(protocol, Message(b"", headers=large), now=2.0)
    send(protocol, now=3.0)
    drain(protocol)
    returned(protocol, back.message_id)
    protocol.connection_lost("cut", 5.0, reconnects=True)
    assert observer.counts == {("q", Outcome.RETURNED): 1}
    protocol.channel_opened(CHANNEL, 1024, 6.0)
    assert observer.counts == {("q", Outcome.RETURNED): 1, ("q", Outcome.UNKNOWN): 1}
    write_and_ack(protocol, 1, 7.0)
    assert observer.counts == {("q", Outcome.RETURNED): 1, ("q", Outcome.UNKNOWN): 1, ("q", Outcome.CONFIRMED): 1}
    assert observer.began == {}
    observer.record()
    assert seconds(recorded) == [4.0, 4.0, 4.0]


def test_telemetry_stores_nothing_about_a_message_that_cannot_be_encoded(recorded: Recorded) -> None:
    protocol = make()
    observer = observe(protocol, recorded)
    with pytest.raises(TypeError):
        protocol.admission.send(Message(b"x", headers={"k": object()}), "", "q", 1.0)
    assert observer.began == {}
    send(protocol, now=2.0)
    assert list(observer.began.values()) == [2.0]


def test_send_durations_are_recorded_at_most_a_hundred_times_a_second_and_the_longest_is_kept(
    recorded: Recorded,
) -> None:
    protocol = make()
    observer = observe(protocol, recorded)
    for at in range(100):
        send(protocol, now=at / 1000)
        drain(protocol)
        protocol.on_ack(at + 1, False, at / 1000 + (5.0 if at == 55 else 1.0))
        observer.record(now=1.0 + at / 1000)
    assert len(recorded) == 10
    assert max(seconds(recorded)) == 5.0
    # A collection gets the rest.
    observer.record()
    assert len(recorded) == 11
    observer.record()
    assert len(recorded) == 11


def test_the_recorded_duration_of_a_send_includes_the_wait_for_admission(recorded: Recorded) -> None:
    protocol = make()
    observer = observe(protocol, recorded)
    protocol.hold("paused", 0.0)
    wait(protocol, now=1.0)
    protocol.lift("paused", 5.0)
    write_and_ack(protocol, 1, 7.0)
    observer.record()
    assert seconds(recorded) == [6.0]


def test_messages_sent_before_telemetry_began_are_counted_without_a_duration(recorded: Recorded) -> None:
    protocol = make()
    send(protocol)
    observer = observe(protocol, recorded)
    write_and_ack(protocol, 1, 7.0)
    observer.record()
    assert seconds(recorded) == []
    assert observer.counts == {("q", Outcome.CONFIRMED): 1}


def test_telemetry_counts_messages_settled_by_one_ack_for_each_destination_and_outcome(recorded: Recorded) -> None:
    protocol = make(mandatory=True)
    observer = observe(protocol, recorded)
    send(protocol, key="a")
    lost = send(protocol, key="a")
    send(protocol, key="b", now=1.0)
    drain(protocol)
    returned(protocol, lost.message_id, key="a")
    protocol.on_ack(3, True, 3.0)
    observer.record()
    assert observer.counts == {
        ("a", Outcome.CONFIRMED): 1,
        ("a", Outcome.RETURNED): 1,
        ("b", Outcome.CONFIRMED): 1,
    }
    errors = [(each, about["messaging.destination.name"], about.get("error.type")) for each, about in recorded]
    assert errors == [(3.0, "a", None), (3.0, "a", "returned"), (2.0, "b", None)]


def test_telemetry_counts_undelivered_messages_in_the_outbox_with_the_reason_of_the_failure(recorded: Recorded) -> None:
    protocol = make(outbox="kept", outbox_keep_undelivered=True, on_refused="fail", mandatory=True)
    observer = observe(protocol, recorded)
    receipts = [send(protocol, now=0.0) for _ in range(4)]
    drain(protocol)
    returned(protocol, receipts[1].message_id)
    protocol.on_ack(2, True, 1.0)
    protocol.on_nack(4, True, 2.0)
    observer.record(now=2.0)
    assert [receipt.outcome for receipt in receipts] == [Outcome.CONFIRMED] + [Outcome.STORED] * 3
    assert [receipt.failure for receipt in receipts] == [None, Outcome.RETURNED, Outcome.NACKED, Outcome.NACKED]
    assert observer.counts == {("q", Outcome.CONFIRMED): 1, ("q", Outcome.RETURNED): 1, ("q", Outcome.NACKED): 2}
    assert [attributes.get("error.type") for _, attributes in recorded] == [None, "returned", "nacked"]


def test_messages_that_a_lost_connection_settles_are_reported_to_telemetry(recorded: Recorded) -> None:
    protocol = make()
    observer = observe(protocol, recorded)
    publish(protocol)
    protocol.parts.unconfirmed.outbound.stopped = True
    send(protocol)
    protocol.connection_lost("gone", 2.0)
    assert observer.counts == {("q", Outcome.UNKNOWN): 1, ("q", Outcome.FAILED): 1}
    # A message that was never written was not sent.
    (sent,) = telemetry._sent(observer)
    assert (sent[0], sent[1]["error.type"]) == (1, "unknown")
    # A connection that takes no message reports nothing.
    empty = make()
    assert observe(empty, recorded).counts == {}
    empty.connection_lost("gone", 2.0)
    with pytest.raises(ProducerClosed):
        empty.admission.send(b"x", "", "q", 3.0)


def test_without_confirms_telemetry_counts_a_written_message_as_sent(recorded: Recorded) -> None:
    protocol = make(confirms=False)
    observer = observe(protocol, recorded)
    send(protocol, now=1.0)
    drain(protocol, now=2.0)
    observer.record()
    assert seconds(recorded) == [1.0]
    assert observer.counts == {("q", Outcome.SENT): 1}


def test_a_send_that_fails_because_the_producer_is_flowed_is_counted_under_the_oldest_hold() -> None:
    protocol = make()
    protocol.line.count_flowed_error()
    protocol.hold("paused", 0.0)
    protocol.hold("rate", 0.0)
    protocol.line.count_flowed_error()
    protocol.line.count_flowed_error()
    assert protocol.line.flowed_errors == {"line": 1, "paused": 2}


def test_the_telemetry_counts_of_a_garbage_collected_producer_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    class Producer:
        """An object that supports weak references."""

    monkeypatch.setattr(telemetry, "_metrics", None)
    producer = Producer()
    protocol = make()
    protocol.hold("paused", 0.0)
    telemetry.watch(producer, protocol, ProducerSettings(name="orders"), "amqp://localhost")
    metrics = telemetry._metrics
    assert metrics is not None
    assert len(metrics._observers) == 1
    del producer
    gc.collect()
    assert not metrics._observers
    ((value, attributes),) = metrics._past["qflow.producer.flow_stops"].values()
    assert (value, attributes["qflow.producer.name"], attributes["server.port"]) == (1, "orders", 5672)
    # No SDK has read the counts of 0, so they are not kept.
    assert all(value for past in metrics._past.values() for value, _ in past.values())
