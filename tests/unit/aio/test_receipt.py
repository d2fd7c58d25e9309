from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from qflow_client.aio.receipt import AsyncReceipt
from qflow_client.amqp.frames import PublishEncoder
from tests.collecting import collect


def test_a_finalizer_that_runs_while_a_receipt_wakes_its_waiters_may_wait_for_that_receipt() -> None:
    class Waits:
        """Waits for a receipt when the garbage collector finds it."""

        def __init__(self, receipt: AsyncReceipt) -> None:
            self.receipt = receipt
            self.itself = self

        def __del__(self) -> None:
            self.receipt._settled()

    async def main() -> None:
        route = PublishEncoder(1, 4096).route("", "q")
        before = gc.get_threshold()
        for later in range(10):
            receipt = AsyncReceipt(b"", route, "p-")
            futures = [receipt._settled() for _ in range(30)]
            waiters: Any = receipt._waiter
            collect()
            gc.set_threshold(10_000)
            try:
                Waits(receipt)
                # Python 3.11 collects garbage when this number of additional objects was created.
                gc.set_threshold(gc.get_count()[0] + later)
                waiters.set_result(None)
            finally:
                gc.set_threshold(*before)
            assert all(future.done() for future in futures)

    asyncio.run(main())


async def _outcome(receipt: AsyncReceipt) -> object:
    return await receipt


@pytest.mark.parametrize("wait", [_outcome, AsyncReceipt.wait, AsyncReceipt.result], ids=["await", "wait", "result"])
def test_closing_the_coroutine_of_a_wait_removes_its_future_from_the_receipt(
    wait: Callable[[AsyncReceipt], Coroutine[Any, Any, object]],
) -> None:
    async def main() -> None:
        receipt = AsyncReceipt(b"", PublishEncoder(1, 4096).route("", "q"), "p-")

        def close_by_hand() -> None:
            waiting = wait(receipt)
            waiting.send(None)
            waiting.close()

        close_by_hand()
        assert receipt._waiter is None
        others = {receipt._settled(), receipt._settled()}
        close_by_hand()
        close_by_hand()
        assert receipt._waiter == others

    asyncio.run(main())
