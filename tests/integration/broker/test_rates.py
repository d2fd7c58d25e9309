from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import cast

import pytest

from qflow_client import Producer, ProducerFlowed
from qflow_client.broker import Broker, RateLimit, RateScope
from tests.effort import rounds
from tests.integration.producer.tools import eventually


def test_F6_a_producer_that_obeys_flow_keeps_to_a_rate_limit_that_changes_during_the_test():
    with Broker() as broker:
        broker.declare_queue("q")
        limit = RateLimit(RateScope.QUEUE, "q", messages=40, burst=0.025)
        broker.set_rate_limit(limit)
        assert broker.rate_limits == (limit,)
        with Producer(broker.url, routing_key="q", capacity=5) as producer:
            producer.send(b"x").result(20)
            began = time.monotonic()
            for _ in range(20):
                producer.send(b"x").result(20)
            # 20 messages at 40 a second. The burst allows one message ahead of the limit.
            assert time.monotonic() - began >= 0.45
            assert producer.flow_state.times_flowed > 0
            broker.set_rate_limit(RateLimit(RateScope.QUEUE, "q", messages=0.01))

            def is_blocked_for_long() -> bool:
                # The producer may still be held, by the new rate or because it has not read the end of a hold.
                with suppress(ProducerFlowed):
                    producer.send_nowait(b"x")
                return broker.producers()[0].blocked_by == ("rate of queue 'q'",)

            eventually(is_blocked_for_long)
            broker.delete_rate_limit("queue", "q")
            broker.wait_until(lambda b: not b.producers()[0].flowed)
            assert not broker.rate_limits
            producer.flush(20)


def test_F6_setting_or_deleting_an_invalid_rate_limit_raises_an_error(broker):
    with pytest.raises(TypeError, match="must be a RateLimit"):
        broker.set_rate_limit(cast(RateLimit, {"messages": 1}))
    with pytest.raises(LookupError, match="rate limit of user 'ann'"):
        broker.delete_rate_limit("user", "ann")
    with pytest.raises(ValueError, match="'channel'"):
        broker.delete_rate_limit("channel", "q")
    assert RateLimit(RateScope.USER, "ann", bytes=5).to_json() == {
        "apply_to": "user",
        "name": "ann",
        "messages": None,
        "bytes": 5,
        "burst": 0.1,
    }


@pytest.mark.parametrize("interval", [0.0, 0.002])
def test_F4_a_queue_that_turns_on_and_off_often_starves_no_producer(interval):
    """test_fairness.py measures without threads how equally producers are served. Here no producer may starve."""
    count, each = 10, rounds(300)
    with Broker(resume_interval=interval) as broker:
        broker.declare_queue("q", arguments={"qpid.flow_stop_count": 30, "qpid.flow_resume_count": 10})

        def work(number):
            with Producer(broker.url, routing_key="q", capacity=10) as producer:
                for _ in range(each):
                    producer.send(b"%d" % number)

        threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(count)]
        for thread in threads:
            thread.start()
        seen = dict.fromkeys((b"%d" % number for number in range(count)), 0)
        while sum(seen.values()) < count * each:
            # Get messages only while the queue is ON. A faster consumer would keep the queue OFF.
            broker.wait_until(lambda b: b.queue("q").flow_stopped or b.queue("q").published == count * each, 60)
            while (message := broker.get("q")) is not None:
                seen[message.body] += 1
                if not broker.queue("q").flow_stopped:
                    break
        for thread in threads:
            thread.join(20)
        assert set(seen.values()) == {each}
        queue = broker.queue("q")
        assert queue.flow_stopped_count > 1
        assert queue.peak_depth <= 30 + count * 10
