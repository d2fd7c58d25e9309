"""Which call of `publish` gets a returned message in the drop-in for aio-pika."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiormq import spec

from qflow_client.aio_pika.encoding import header_frame
from qflow_client.aio_pika.returns import Expected, Returns
from qflow_client.core.tickets import SendTicket


@pytest.mark.parametrize(
    ("key", "is_late", "is_reported"), [("q", False, True), ("q", True, True), ("nowhere", False, False)]
)
def test_a_return_is_reported_to_the_call_that_published_its_message_even_after_the_deadline_of_this_call(
    key: str, is_late: bool, is_reported: bool
) -> None:
    async def answer() -> Any:
        returns, expected = Returns(), Expected(asyncio.get_running_loop().create_future(), "", "q")
        returns.expect("one id", expected)
        if is_late:
            # The timer of `publish` does this. uvloop may read the return before it resumes `publish`.
            expected.settled.set_result(None)
        header = header_frame(spec.Basic.Properties(message_id="one id"), 0, 1)[7:-1]
        channel: Any = SimpleNamespace(number=1, on_return_raises=False, on_return_callbacks=())
        # The key "nowhere" is of an earlier message with the same id, whose `publish` was cancelled.
        returns.tell(spec.Basic.Return(exchange="", routing_key=key), header, b"", channel, "a channel")
        assert expected.settled.done() is is_reported
        return expected.answer

    assert (asyncio.run(answer()) is not None) is is_reported


def test_a_return_is_not_reported_to_a_call_whose_message_still_waits_in_line() -> None:
    async def answers() -> list[Any]:
        returns, loop = Returns(), asyncio.get_running_loop()
        waiting, sent = (Expected(loop.create_future(), "", "q") for _ in range(2))
        waiting.ticket = SendTicket(b"", "", "q", 0, 0.0)
        for each in (waiting, sent):
            returns.expect("one id", each)
        header = header_frame(spec.Basic.Properties(message_id="one id"), 0, 1)[7:-1]
        channel: Any = SimpleNamespace(number=1, on_return_raises=False, on_return_callbacks=())
        returns.tell(spec.Basic.Return(exchange="", routing_key="q"), header, b"", channel, "a channel")
        return [waiting.answer, sent.answer]

    waiting, sent = asyncio.run(answers())
    assert waiting is None
    assert sent is not None
