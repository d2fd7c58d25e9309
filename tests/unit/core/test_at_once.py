"""E2: messages that are admitted without a step, at any moment and from any thread."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from qflow_client import Message, ProducerSettings, Receipt
from qflow_client.core.admission import Admission
from qflow_client.core.channel import Channel
from qflow_client.core.protocol import ProducerProtocol
from tests.interrupting import EVERY, each_interrupt

from .support import CHANNEL, FRAME_MAX, MAX_BODY, Wire, check_order, drain, make, reconnect, send, write
from .test_steps import Watch


@pytest.mark.parametrize(
    "payload", [b"abc", b"", b"x" * (3 * MAX_BODY), Message(b"abc", headers={"k": 1}), Message(b"", priority=3)]
)
@pytest.mark.parametrize("key", ["q", "another"])
def test_send_at_once_admits_a_message_with_the_same_effect_as_send(payload: bytes | Message, key: str) -> None:
    protocol, twin = make(), make()
    for each in (payload, b"after"):
        receipt, other = protocol.admission.send_at_once(each, "", key), twin.admission.send(each, "", key, 0.0)
        assert receipt is not None
        assert other is not None
        assert (receipt.message_id, receipt.message) == (other.message_id, other.message)
    assert protocol.window.used == protocol.unsettled == 2
    assert protocol.unwritten == twin.unwritten
    assert drain(protocol) == drain(twin)
    assert protocol.unwritten == 0


def _watch(protocol: ProducerProtocol) -> None:
    protocol.admission.observer = Watch()


REFUSED: dict[str, tuple[dict[str, Any], Callable[[ProducerProtocol], object]]] = {
    "full": ({"capacity": 1}, lambda protocol: send(protocol)),
    "held": ({}, lambda protocol: protocol.hold("paused", 0.0)),
    "closed": ({}, lambda protocol: protocol.close("closed", 0.0)),
    "others wait": ({}, lambda protocol: setattr(protocol.controller, "waiting", 1)),
    "others are admitted": ({}, lambda protocol: setattr(protocol.admission, "is_granting", True)),
    "watched": ({}, _watch),
    "by bytes": ({"capacity_bytes": 100}, lambda protocol: None),
    "by rate": ({"rate": 10.0}, lambda protocol: None),
    "too much to write": ({"max_unwritten_bytes": 1}, lambda protocol: None),
}


@pytest.mark.parametrize("why", REFUSED)
def test_send_at_once_returns_none_and_changes_nothing_in_all_cases_that_only_send_handles(why: str) -> None:
    settings, prepare = REFUSED[why]
    protocol = make(**settings)
    prepare(protocol)
    before = protocol.admission.admitted, protocol.window.used, protocol.unwritten, protocol.unsettled_receipts
    assert protocol.admission.send_at_once(b"abc", "", "q") is None
    assert (
        protocol.admission.admitted,
        protocol.window.used,
        protocol.unwritten,
        protocol.unsettled_receipts,
    ) == before


@pytest.mark.parametrize("missing", ["GIL", "CPython"])
def test_send_at_once_always_returns_none_without_the_gil_or_on_pypy(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    if missing == "GIL":
        monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    else:
        monkeypatch.setattr(sys.implementation, "name", "pypy")
    protocol = make()
    assert protocol.admission.send_at_once(b"abc", "", "q") is None
    assert send(protocol, b"abc").message_id


# Python 3.12 and later.
_MONITORING: Any = getattr(sys, "monitoring", None)


def _use_monitoring(tool: Any) -> None:
    if tool:
        _MONITORING.use_tool_id(_MONITORING.PROFILER_ID, "a tool")
    else:
        _MONITORING.free_tool_id(_MONITORING.PROFILER_ID)


HOOKS: dict[str, Callable[[Any], object]] = {
    "trace": sys.settrace,
    "profile": sys.setprofile,
    **({"monitoring": _use_monitoring} if _MONITORING else {}),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_send_at_once_always_returns_none_if_the_producer_was_made_under_a_debugger_or_tracer(hook: str) -> None:
    before = sys.gettrace()
    HOOKS[hook](lambda *_: None)
    try:
        protocol = make()
    finally:
        HOOKS[hook](before if hook == "trace" else None)
    assert protocol.admission.send_at_once(b"abc", "", "q") is None
    assert send(protocol, b"abc").message_id


def test_send_at_once_returns_none_for_a_mandatory_message_with_an_id_from_the_application() -> None:
    protocol = make()
    assert protocol.admission.send_at_once(Message(b"abc", message_id="own"), "", "q") is None
    protocol = make(mandatory=False)
    assert protocol.admission.send_at_once(Message(b"abc", message_id="own"), "", "q") is not None


def test_send_at_once_does_not_admit_a_message_that_was_encoded_for_a_channel_that_is_lost() -> None:
    reopened: list[int] = []

    class Reopening(Receipt):
        __slots__ = ()

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            if not reopened:
                reopened.append(CHANNEL + 1)
                protocol.channel_closed(404, "NOT_FOUND", (60, 40), 1.0)
                protocol.channel_opened(CHANNEL + 1, FRAME_MAX, 1.0)

    settings = ProducerSettings(routing_key="q")
    protocol = ProducerProtocol(settings, id_prefix="p-", receipt_type=Reopening, now=0.0)
    protocol.channel_opened(CHANNEL, FRAME_MAX, 0.0)
    assert protocol.admission.send_at_once(b"abc", "", "another") is None
    assert protocol.admission.admitted == 0
    assert protocol.admission.send_at_once(b"abc", "", "another") is not None
    assert write(protocol, 10)[1:3] == (CHANNEL + 1).to_bytes(2, "big")


def test_send_at_once_admits_a_whole_message_or_nothing_if_it_is_interrupted() -> None:
    admitted = []
    for interrupt in each_interrupt(least=3):
        protocol = make()
        send(protocol, b"1")
        interrupt(lambda: protocol.admission.send_at_once(b"2", "", "another"))  # noqa: B023  # called at once
        receipts = protocol.unsettled_receipts
        assert protocol.window.used == len(receipts) == protocol.admission.admitted
        admitted.append(len(receipts) == 2)
        send(protocol, b"3")
        wire = Wire().read(drain(protocol))
        assert [each.body for each in wire.messages] == [b"1", *([b"2"] if admitted[-1] else []), b"3"]
        assert protocol.unwritten == 0
    assert admitted == sorted(admitted), "from one point on"


def _refuse(protocol: ProducerProtocol) -> None:
    protocol.on_nack(2, False, 0.5)


def _flow(protocol: ProducerProtocol) -> None:
    protocol.on_flow(False, 0.5)
    protocol.on_flow(True, 0.5)


def _lose(protocol: ProducerProtocol) -> None:
    reconnect(protocol, 0.5, 0.5)


STEPS: dict[str, Callable[[ProducerProtocol], object]] = {
    "send": lambda protocol: protocol.admission.send(b"own", "", "q", 0.5),
    "at once": lambda protocol: protocol.admission.send_at_once(b"own", "", "another"),
    "write": lambda protocol: drain(protocol, 0.5),
    "confirm": lambda protocol: protocol.on_acks([(1, 2)], 0.5),
    "confirm many": lambda protocol: protocol.on_ack(3, True, 0.5),
    "refuse": _refuse,
    "flow": _flow,
    "lose": _lose,
    "capacity": lambda protocol: protocol.set_capacity(50, 0.5),
    "heal": lambda protocol: protocol.steps.heal(),
    "flow state": lambda protocol: protocol.flow_state(0.5),
}


@pytest.mark.parametrize("step", STEPS)
def test_send_at_once_can_be_called_by_a_signal_handler_in_the_middle_of_any_producer_method(step: str) -> None:
    nested = 0
    for interrupt in each_interrupt(least=1, every=EVERY):
        protocol = make(capacity=100)
        for number in range(4):
            send(protocol, b"%d" % number)
        size = protocol.unwritten
        for number in range(4, 6):
            send(protocol, b"%d" % number)
        # Four messages are written, and the next has begun.
        write(protocol, size + 10)
        receipts: list[Receipt | None] = []

        def handler() -> None:
            receipts.append(protocol.admission.send_at_once(b"nested", "", "q"))  # noqa: B023  # called at once

        interrupt(lambda: STEPS[step](protocol), handler=handler)  # noqa: B023  # likewise
        nested += any(receipts)
        check_order(protocol)
        unsettled = protocol.unsettled_receipts
        assert protocol.window.used == len(unsettled)
        assert all(receipt in unsettled for receipt in receipts if receipt is not None)
        assert len({receipt._number for receipt in unsettled}) == len(unsettled)
        drain(protocol, 1.0)
        assert protocol.unwritten == 0
        protocol.on_ack(0, True, 2.0)
        drain(protocol, 3.0)
        protocol.on_ack(0, True, 3.0)
        assert protocol.unsettled == 0
    assert nested or step in ("capacity",)


class CountingAdmission(Admission):
    """Admits a message whenever the bytes of a message are counted, a given number of times."""

    __slots__ = ()
    costs = 0

    def cost(self, receipt: Receipt) -> int:
        cost = super().cost(receipt)
        if CountingAdmission.costs:
            CountingAdmission.costs -= 1
            self.send_at_once(b"meanwhile", "", "q")
        return cost


class CountingChannel(Channel):
    """Admits a message whenever all unsettled messages are counted, a given number of times."""

    __slots__ = ()
    times = 0

    def unsettled(self) -> tuple[Receipt, ...]:
        receipts = super().unsettled()
        if CountingChannel.times:
            CountingChannel.times -= 1
            self._admission.send_at_once(b"meanwhile", "", "q")
        return receipts


@pytest.mark.parametrize(("times", "costs"), [(1, 0), (2, 0), (0, 1), (2, 2)])
def test_messages_that_send_at_once_admits_while_unsettled_messages_are_recounted_are_counted(
    times: int, costs: int
) -> None:
    protocol = make()
    protocol.admission.__class__, protocol.channel.__class__ = CountingAdmission, CountingChannel
    send(protocol)
    # A message with an id of its own, which is recorded and then not admitted.
    protocol.parts.returns.by_id = {"own": [Receipt(b"", protocol.admission._last[2], None)]}
    CountingChannel.times, CountingAdmission.costs = times, costs
    protocol.steps.heal()
    assert protocol.parts.returns.by_id == {}
    assert protocol.window.used == len(protocol.unsettled_receipts) == 1 + times + costs
    drain(protocol)
    assert protocol.unwritten == 0


def test_messages_that_several_threads_send_at_once_are_numbered_in_the_order_of_admission() -> None:
    protocol = make(capacity=10_000)
    interval = sys.getswitchinterval()

    def run() -> None:
        for number in range(500):
            assert protocol.admission.send_at_once(b"%d" % number, "", "q" if number % 3 else "another") is not None

    threads = [threading.Thread(target=run) for _ in range(8)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert [receipt._number for receipt in protocol.unsettled_receipts] == list(range(1, 4001))
    assert protocol.window.used == 4000
    drain(protocol)
    assert protocol.unwritten == 0
