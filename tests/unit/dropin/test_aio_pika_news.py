"""E2: the reports that the drop-in for aio-pika passes on after a change, with an interrupt in the middle."""

from __future__ import annotations

import asyncio

from qflow_client.aio_pika.flow import AIO_PIKA, ChannelFlow
from tests.interrupting import interrupted


def test_E2_ctrl_c_loses_no_wake_up_and_no_flow_event_of_the_aio_pika_drop_in() -> None:
    async def publish(at: int) -> int:
        flow = ChannelFlow(AIO_PIKA.settings(), confirms=True, restores=False, is_closing=bool)
        flow.protocol.channel_opened(1, 0, 0.0)
        heard: list[str] = []
        flow.on_flow(lambda event: heard.append(str(event.kind)))
        flow.protocol.hold("paused", 0.0)
        flow.protocol.lift("paused", 0.0)
        waiters = [flow._loop.create_future() for _ in range(3)]
        flow.protocol.reports.wake += waiters
        come = interrupted(flow._kick, at)
        # The next change, or the next bytes of the broker.
        flow._kick()
        for _ in range(4):
            await asyncio.sleep(0)
        assert all(waiter.done() for waiter in waiters)
        assert heard == ["flowed", "unflowed"]
        return come

    at = 1
    while asyncio.run(publish(at)):
        at += 1
    assert at > 1
