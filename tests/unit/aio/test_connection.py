"""The connection classes of aio-pika, with the additions of this package."""

from __future__ import annotations

import asyncio
import gc

import pytest
from yarl import URL

from qflow_client.aio.connection import TappedConnection, TappedRobustConnection


@pytest.mark.parametrize("kind", [TappedConnection, TappedRobustConnection])
def test_an_aio_pika_connection_that_is_garbage_collected_while_the_event_loop_is_stopped_emits_no_warning(
    kind: type[TappedConnection], recwarn: pytest.WarningsRecorder
) -> None:
    async def make() -> TappedConnection:
        return kind(URL("amqp://localhost"))

    # Garbage of earlier tests may emit warnings.
    gc.collect()
    recwarn.clear()
    asyncio.set_event_loop(None)
    loop = asyncio.new_event_loop()
    connection = loop.run_until_complete(make())
    del connection
    gc.collect()
    loop.close()
    assert not recwarn.list
