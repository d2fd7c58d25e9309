"""The same program with pika and with the drop-in, against a broker that sends ``Channel.Flow``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pika as original
import pytest

import qflow_client.pika as drop_in
from qflow_client import FlowControlTimeout
from tests.integration.producer.tools import Job, eventually, start

COUNT = 500


def program(
    module: Any, url: str, queue: str, *, confirms: bool = False, has_come: Callable[[int], object] = bool
) -> None:
    """Publish far more messages than the queue may hold. `has_come` waits until a number of them has arrived."""
    with module.BlockingConnection(module.URLParameters(url)) as connection:
        channel = connection.channel()
        if confirms:
            channel.confirm_delivery()
        for number in range(COUNT):
            channel.basic_publish("", queue, b"%d" % number)
            has_come(number + 1)
            connection.process_data_events(0.001)


@pytest.fixture
def queues(broker: Any) -> None:
    for queue in "theirs", "ours":
        broker.declare_queue(queue, arguments={"qpid.flow_stop_count": 10, "qpid.flow_resume_count": 5})


@pytest.mark.usefixtures("queues")
def test_C3_pika_publishes_during_a_stop_and_the_drop_in_waits_until_its_deadline(broker):
    program(original, broker.url, "theirs")
    broker.wait_until(lambda broker: broker.queue("theirs").depth == COUNT)

    def has_come(count: int) -> None:
        # Wait for each message. Otherwise the program could write all messages before a slow broker sends the stop.
        broker.wait_until(lambda broker: broker.queue("ours").published == count)

    with pytest.raises(FlowControlTimeout, match="channel_flow"):
        program(drop_in, f"{broker.url}?max_producer_flow_control_wait=0.3", "ours", has_come=has_come)
    # The queue gets one message above the threshold, and the messages in flight until the client reads the stop.
    assert 11 <= broker.queue("ours").peak_depth < COUNT


@pytest.mark.usefixtures("queues")
def test_C3_the_drop_in_continues_to_publish_when_a_stop_ends(broker):
    job: Job = start(program, drop_in, broker.url, "ours", confirms=True)
    # The publisher may be slower than this consumer, so first wait until the queue is ON.
    broker.wait_until(lambda broker: broker.queue("ours").flow_stopped)
    taken: list[bytes] = []

    def take() -> bool:
        message = broker.get("ours")
        if message is not None:
            taken.append(message.body)
        return len(taken) == COUNT

    eventually(take, timeout=60)
    job.result()
    assert taken == [b"%d" % number for number in range(COUNT)]
    assert broker.queue("ours").flow_stopped_count >= 1
    assert broker.queue("ours").peak_depth == 11
