"""Each producer sends flights through each broker. They arrive complete and in order, and resent ones are marked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from typing import Any

import pika
import pytest

from qflow_client import __version__
from qflow_client.testing.proxy import FaultProxy
from tests.effort import EFFORT
from tests.interop import matrix
from tests.interop.contract.providers import Inbox, Providers, version_of
from tests.interop.contract.test_contract import ALL, BROKERJ, OURS, RABBITMQ
from tests.interop.flights.data import END, FLIGHTS, ORIGINS, flights, origin_of
from tests.interop.flights.senders import CUT, RECOVERING, SENDERS

# The maximum for some flights, and on a slow machine for all flights.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

#: Number of flights: all, or as many as fit into a usual test run.
COUNT = FLIGHTS if EFFORT == "nightly" else 4_000
# Stop threshold of the queue in bytes, if the broker has thresholds. It keeps waiting messages in memory small.
CAPACITY = 8_000_000

_all = cache(flights)


def _pairs() -> list[Any]:
    marks = dict.fromkeys(RABBITMQ, pytest.mark.rabbitmq) | dict.fromkeys(BROKERJ, pytest.mark.brokerj)
    return [
        pytest.param(broker, producer, marks=marks.get(broker, ()), id=f"{broker}, {producer}")
        for broker in ALL
        for producer in SENDERS
    ]


def _publish_end(url: str, queue: str) -> None:
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        connection.channel().basic_publish("", queue, END)


@pytest.mark.parametrize(("broker", "producer"), _pairs())
def test_all_messages_of_the_flight_data_arrive_in_order_and_resent_messages_are_marked(
    broker: str,
    producer: str,
    providers: Providers,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    is_own = broker == OURS and not os.environ.get("QFLOW_BROKER_URL")
    url = request.getfixturevalue("own_url") if is_own else providers[broker].url
    rows = _all(COUNT)
    send = SENDERS[producer]
    inbox = Inbox(url)
    with ExitStack() as stack:
        stack.callback(inbox.close)
        queue = inbox.declare({"x-qpid-capacity": CAPACITY, "x-qpid-flow-resume-capacity": CAPACITY // 2})
        command = [sys.executable, "-m", "tests.interop.flights.consumer", url, queue, str(COUNT)]
        consumer = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        stack.callback(consumer.kill)
        assert consumer.stdout is not None
        assert consumer.stdout.readline() == "ready\n"
        proxy = stack.enter_context(FaultProxy(url)) if producer in RECOVERING else None
        threads = stack.enter_context(ThreadPoolExecutor(len(ORIGINS)))
        began = time.monotonic()
        jobs = []
        for origin in ORIGINS:
            faulty = proxy if origin == ORIGINS[0] else None
            bodies = [row for row in rows if origin_of(row) == origin]
            jobs.append(threads.submit(send, faulty.url if faulty is not None else url, queue, bodies, faulty))
        for job in jobs:
            job.result()
        _publish_end(url, queue)
        found = json.loads(consumer.stdout.readline())
        seconds = time.monotonic() - began
    version = __version__ if is_own else version_of(url)
    shown = {"broker": broker, "version": version, "producer": producer, "seconds": round(seconds, 1)}
    record_property(matrix.FLIGHTS, {**shown, "count": COUNT, "found": found})
    print(f"{broker}, {producer}: {COUNT / seconds:,.0f}/s, {found}")
    assert found["flights"] == COUNT
    assert (found["damaged"], found["out of order"], found["twice and not marked"]) == (0, 0, 0)
    # Messages in flight were resent and marked if the connection was cut. Otherwise no message was resent.
    assert found["sent again"] >= (2 * CUT if proxy is not None else 0)
    assert found["twice"] <= found["sent again"]
    if proxy is None:
        assert found["sent again"] == 0
