"""Programs that tests run in separate processes, because a signal or a fork affects a whole process."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import uvloop

from qflow_client import (
    AsyncProducer,
    FlowEvent,
    Outbox,
    OutboxInUse,
    Outcome,
    OutcomeUnknown,
    ProducerClosed,
    UndeliveredMessages,
)
from qflow_client.broker import Broker
from qflow_client.logs import flush_logs
from tests.collecting import collect
from tests.integration.producer.programs import connected_to

from .tools import held, in_line, soon


def _say(word: str) -> None:
    # Write once. With PYTHONUNBUFFERED, `print` writes the line end separately, and another thread may log in between.
    print(f"{word}\n", end="", flush=True)


def interrupted(*calls: str) -> None:
    """Press Ctrl-C in each of these calls, while the main task waits and a message is unconfirmed."""
    for call in calls:
        _interrupted(call)
    _say("fine")


def _interrupted(call: str) -> None:
    with Broker() as broker:
        broker.declare_queue("q")

        async def main() -> None:
            async with AsyncProducer(broker.url, routing_key="q", capacity=1) as producer:
                broker.withhold_confirms()
                receipt = await producer.send(b"written")
                await soon(lambda: broker.queue("q").depth)
                broker.flow(False)
                await held(producer, "channel_flow")

                async def say() -> None:
                    if call == "send":
                        await in_line(producer, 1)
                    _say("waiting")

                saying = asyncio.create_task(say())
                calls: dict[str, Any] = {
                    "send": lambda: producer.send(b"interrupted", timeout=None),
                    "flush": lambda: producer.flush(timeout=None),
                    "result": receipt.result,
                    "wait_unflowed": producer.wait_unflowed,
                    "close": lambda: producer.close(timeout=None),
                }
                await calls[call]()
                await saying

        try:
            asyncio.run(main())
        except KeyboardInterrupt:
            # A separate thread writes the log.
            assert flush_logs(20)
            _say("interrupted")
        broker.wait_until(lambda b: not b.connections())
        assert [message.body for message in broker.messages("q")] == [b"written"]


def cancelled_while_closing(loop: str, *ways: str) -> None:
    """Cancel `close` after a number of loop iterations, with a working connection and an unconfirmed message."""
    new_loop = uvloop.new_event_loop if loop == "uvloop" else asyncio.new_event_loop
    for way in ways:
        _cancelled_while_closing(way, new_loop)
    _say("fine")


def _cancelled_while_closing(way: str, new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    reports: list[str] = []

    class _Reports(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            reports.append(record.getMessage())

    handler = _Reports()
    logging.getLogger("qflow_client").addHandler(handler)
    logging.getLogger("aiormq").addHandler(logging.NullHandler())

    async def main(url: str, turns: int) -> None:
        producer = await AsyncProducer(url, routing_key="q").connect()
        receipt = await producer.send(b"")
        me = asyncio.current_task()
        assert me is not None

        def interrupt(left: int) -> None:
            if left:
                asyncio.get_running_loop().call_soon(interrupt, left - 1)
            elif way == "ctrl-c":
                os.kill(os.getpid(), signal.SIGINT)
            else:
                me.cancel()
                if way == "cancelled twice":
                    asyncio.get_running_loop().call_soon(me.cancel)

        if way != "timeout":
            interrupt(turns)
        undelivered: Any = None
        try:
            async with asyncio.timeout(0.0003 * turns if way == "timeout" else None):
                await producer.close(timeout=0)
        except asyncio.CancelledError as error:
            undelivered = getattr(error, "undelivered", None)
            raise
        except TimeoutError as error:
            undelivered = getattr(error.__cause__, "undelivered", None)
            raise
        except UndeliveredMessages as error:
            # `close` ended before it was cancelled.
            undelivered = error
            reports.append("closed on")
        finally:
            assert undelivered.receipts == (receipt,)
            assert receipt.outcome is Outcome.UNKNOWN
            assert asyncio.all_tasks() == {me}
            await producer.close()

    with Broker() as broker:
        broker.declare_queue("q")
        broker.withhold_confirms()
        for turns in range(16):
            reports.clear()
            with (
                suppress(KeyboardInterrupt, asyncio.CancelledError, TimeoutError),
                asyncio.Runner(loop_factory=new_loop) as runner,
            ):
                runner.run(main(broker.url, turns))
            assert flush_logs(20)
            assert len([report for report in reports if "closed on" in report]) == 1, (way, turns, reports)
    logging.getLogger("qflow_client").removeHandler(handler)


def forked(url: str, count: str) -> None:
    """Fork `count` times while the producer is in use."""

    async def main() -> None:
        async with AsyncProducer(url, routing_key="q") as producer:
            receipts: list[Any] = []
            events = producer.flow_events(kinds=("paused",))
            next_event = asyncio.ensure_future(anext(events))
            enough = False

            async def work() -> None:
                while not enough:
                    receipts.append(await producer.send(b"parent"))

            working = asyncio.create_task(work())
            for turn in range(int(count)):
                await soon(lambda turn=turn: len(receipts) > 200 * turn)  # type: ignore[misc]  # mypy infers no type
                pid = os.fork()
                if pid == 0:
                    if connected_to(url):
                        os._exit(9)
                    os._exit(_child(producer, url, events))
                _, status = await asyncio.to_thread(os.waitpid, pid, 0)
                assert os.waitstatus_to_exitcode(status) == 0, status
            enough = True
            await working
            assert not next_event.done()
            producer.pause()
            assert (await next_event).hold is not None
            producer.resume()
            await producer.flush(timeout=20)
            _say(str(len(receipts)))

    asyncio.run(main())
    _say("fine")


def forked_while_disconnected(url: str, own_url: str, count: str) -> None:
    """Fork `count` times between two attempts to connect, or during an attempt. The proxy of the test decides."""

    logging.disable()

    async def main() -> None:
        settings: Any = {"reconnect_delay": 0.05, "reconnect_delay_max": 0.1}
        async with AsyncProducer(url, routing_key="q", **settings) as producer:
            receipt = await producer.send(b"unsettled")
            _say("sent")
            await held(producer, "disconnected")
            for _ in range(int(count)):
                pid = os.fork()
                if pid == 0:
                    if connected_to(url):
                        os._exit(9)
                    assert isinstance(receipt.error(), OutcomeUnknown)
                    os._exit(_child(producer, own_url))
                _, status = await asyncio.to_thread(os.waitpid, pid, 0)
                assert os.waitstatus_to_exitcode(status) == 0, status
            _say("forked")
            assert await receipt.result(timeout=20) is Outcome.CONFIRMED
            await (await producer.send(b"parent"))

    asyncio.run(main())
    _say("fine")


def _child(producer: AsyncProducer, url: str, events: AsyncIterator[FlowEvent] | None = None) -> int:
    began = time.monotonic()

    async def main() -> int:
        calls: Any = (
            lambda: producer.send(b"child"),
            lambda: producer.send(b"child", timeout=0),
            producer.wait_unflowed,
            producer.flush,
        )
        for call in calls:
            try:
                await call()
            except ProducerClosed as error:
                if "child" not in str(error) or str(os.getpid()) not in str(error):
                    return 2
            else:
                return 3
        for each in (events, producer.flow_events()):
            if each is not None and [event async for event in each]:
                return 6
        try:
            await producer.close()
        except UndeliveredMessages:
            return 4
        async with AsyncProducer(url, routing_key="r") as own:
            await (await own.send(b"child"))
        return 0 if producer.closed and time.monotonic() - began < 15 else 5

    return asyncio.run(main())


def forgotten(url: str, unconfirmed: str = "", dropped: str = "") -> None:
    """A program that ends without closing its producer. If `dropped` is set, it first drops its last reference."""
    producers = []

    async def main() -> None:
        producer = await AsyncProducer(url, routing_key="q").connect()
        producers.append(producer)
        receipt = await producer.send(b"")
        if not unconfirmed:
            await receipt

    asyncio.run(main())
    if dropped:
        producers.clear()
        collect()
    else:
        sys.modules["kept"] = producers  # type: ignore[assignment]  # kept until the very end
    _say("fine")


def forgotten_with_its_loop(url: str) -> None:
    """A program that does not close its producer, and whose loop is collected when no new thread can start."""
    loop = asyncio.new_event_loop()
    producer = loop.run_until_complete(AsyncProducer(url, routing_key="q").connect())
    loop.close()
    sys.modules["forgotten"] = (loop, producer)  # type: ignore[assignment]  # kept until the very end
    _say("fine")


def dropped_before_its_loop_is_closed(url: str, outbox: str) -> None:
    """A program that drops its producers before it closes their loop. Then it opens the outbox of one producer."""
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    # Hide the errors that aiormq logs.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    loop = asyncio.new_event_loop()
    producers = [
        loop.run_until_complete(AsyncProducer(url, routing_key="q", name=name, outbox=path).connect())
        for name, path in (("lost", None), ("stored", outbox))
    ]
    for each in producers:
        loop.run_until_complete(each.send(b""))
    producers.clear()
    del each
    collect()
    loop.close()
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            Outbox(outbox).close()
        except OutboxInUse:
            time.sleep(0.01)
        else:
            _say("free")
            break


if __name__ == "__main__":
    # A shell lets background jobs ignore Ctrl-C, and their child processes inherit this.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    globals()[sys.argv[1]](*sys.argv[2:])
