"""`qflow broker` watches its resident size."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from qflow_client import Producer
from qflow_client.broker import Broker
from qflow_client.cli import broker as command
from qflow_client.cli.resident import ALARM, ResidentWatch, resident_size


def test_E9_publishers_are_blocked_while_messages_make_the_broker_process_exceed_its_memory_limit() -> None:
    watch = ResidentWatch(1000, 800)
    assert watch.most == 1960
    seen = []
    for resident, counted in [
        (1960, 800),
        (1961, 400),
        (1961, 401),
        (1900, 401),
        (1860, 401),
        # Memory that only the allocator keeps must not block publishers for ever.
        (5000, 300),
        (5000, 800),
        (5000, 200),
    ]:
        changed = watch.look(resident, counted)
        seen.append((changed, watch.is_over))
    assert seen == [
        (False, False),
        (False, False),
        (True, True),
        (False, True),
        (True, False),
        (False, False),
        (True, True),
        (True, False),
    ]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not say")
def test_the_measured_resident_set_size_is_that_of_the_current_process() -> None:
    before = resident_size()
    assert before is not None
    block = b"x" * (64 << 20)
    after = resident_size()
    assert after is not None
    assert after - before > len(block) // 2


def test_E9_the_memory_alarm_begins_when_the_process_exceeds_its_limit_and_ends_when_it_has_shrunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = 10 << 20
    monkeypatch.setattr(command, "resident_size", lambda: size)
    monkeypatch.setattr(command, "_LOOK", 0.01)
    with Broker(memory_limit=1 << 20) as running, ExitStack() as stack:
        command._watch_resident_size(running, stack)
        running.declare_queue("q")
        with Producer(running.url, routing_key="q") as producer:
            producer.send_many([bytes(10_000)] * 80)
            producer.flush()
            assert not running.alarms
            size = 12 << 20
            running.wait_until(lambda broker: ALARM in broker.alarms)
            assert "its limit is 11744051" in running.alarms[ALARM]
            size = 10 << 20
            running.wait_until(lambda broker: not broker.alarms)


def test_without_a_process_size_limit_the_broker_does_not_measure_its_resident_size() -> None:
    with Broker() as running, ExitStack() as stack:
        command._watch_resident_size(running, stack)
        assert not stack.pop_all()._exit_callbacks  # type: ignore[attr-defined]
