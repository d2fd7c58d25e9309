"""The window of a channel of the drop-in for aio-pika, and E2: its reports, with an interrupt in the middle."""

from __future__ import annotations

import asyncio

import pytest

from qflow_client.aio_pika.flow import AIO_PIKA, ChannelFlow
from tests.interrupting import Interrupt, each_interrupt


@pytest.mark.parametrize(("capacity", "window"), [(5, 5), ("auto", 70)])
def test_C6_without_confirms_only_an_adaptive_window_is_replaced_by_capacity_max(
    capacity: int | str, window: int
) -> None:
    async def window_of_a_channel() -> int:
        settings = AIO_PIKA.settings(capacity=capacity, capacity_max=70)
        flow = ChannelFlow(settings, confirms=False, restores=False, is_closing=bool)
        return flow.protocol.limits.window.capacity

    assert asyncio.run(window_of_a_channel()) == window


def test_E2_ctrl_c_loses_no_wake_up_and_no_flow_event_of_the_aio_pika_drop_in() -> None:
    async def publish(interrupt: Interrupt) -> None:
        flow = ChannelFlow(AIO_PIKA.settings(), confirms=True, restores=False, is_closing=bool)
        flow.protocol.channel_opened(1, 0, 0.0)
        heard: list[str] = []
        flow.on_flow(lambda event: heard.append(str(event.kind)))
        flow.protocol.hold("paused", 0.0)
        flow.protocol.lift("paused", 0.0)
        waiters = [flow._loop.create_future() for _ in range(3)]
        flow.protocol.reports.wake += waiters
        interrupt(flow._kick)
        # The next change, or the next bytes of the broker.
        flow._kick()
        for _ in range(4):
            await asyncio.sleep(0)
        assert all(waiter.done() for waiter in waiters)
        assert heard == ["flowed", "unflowed"]

    for interrupt in each_interrupt(least=1):
        asyncio.run(publish(interrupt))
