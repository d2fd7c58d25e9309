"""How other threads wake the I/O thread."""

from __future__ import annotations

import select
from collections.abc import Iterator
from contextlib import closing

import pytest

from qflow_client.amqp.tap import Tap
from qflow_client.guard import Guard
from qflow_client.sync.pika_io import TapIOServices
from tests.interrupting import each_interrupt, press


@pytest.fixture
def services() -> Iterator[TapIOServices]:
    with closing(TapIOServices(Tap(), Guard(), lambda: None)) as services:
        yield services
        services.get_native_ioloop().close()


def is_due(services: TapIOServices) -> bool:
    """Return True if the I/O thread was woken and will write."""
    return bool(services._calls) and bool(select.select([services._woken], [], [], 0)[0])


@pytest.mark.parametrize("meanwhile", ["Ctrl-C", "a pump"])
def test_E2_if_wake_is_interrupted_at_any_line_the_io_thread_counts_as_awake_only_if_it_will_write(
    services: TapIOServices, meanwhile: str
) -> None:
    for interrupt in each_interrupt(least=3):
        handler = press if meanwhile == "Ctrl-C" else services._on_woken
        interrupt(services.wake, handler=handler)
        assert not services.awake or is_due(services)
        services._on_woken()
        assert not services.awake
