"""E9: HTTP requests and AMQP share the loop. The tests count the objects per loop iteration and measure no time."""

from __future__ import annotations

import asyncio
import json
import selectors
from collections.abc import Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from itertools import pairwise
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from qflow_client import AsyncProducer
from qflow_client.broker import Broker
from qflow_client.broker.http import documents, events, server
from qflow_client.broker.http.events import Watch
from qflow_client.broker.http.server import HttpServer
from qflow_client.broker.http.turns import Turns
from tests.effort import rounds

# All rules limit the objects in one turn of the loop, so fewer queues prove the same in less time.
QUEUES = rounds(4_000, least=1_100)


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop that does not wait for timers. Its clock only moves on to the time of the next timer."""

    def __init__(self) -> None:
        selector = selectors.DefaultSelector()
        self._now = 0.0
        super().__init__(selector)
        select = selector.select

        def skip(timeout: float | None = None) -> Any:
            self._now += timeout or 0.0
            return select(timeout and 0)

        selector.select = skip  # type: ignore[method-assign]  # simulated time

    def time(self) -> float:
        return self._now

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        # Threads end in real time, so they get no limit in simulated time.
        await super().shutdown_default_executor()


class Turn:
    """Counts objects in each turn of the loop."""

    def __init__(self) -> None:
        self.count = self.total = self.most = 0

    def add(self) -> None:
        self.count += 1
        self.total += 1
        self.most = max(self.most, self.count)

    def begin(self) -> None:
        self.count = 0
        asyncio.get_running_loop().call_soon(self.begin)


@pytest.fixture
def turn(monkeypatch: pytest.MonkeyPatch) -> Turn:
    """A counter of the objects that `Turns` yields."""
    turn, each = Turn(), Turns.each

    async def counted(self: Turns, things: Any) -> Any:
        async for thing in each(self, things):
            turn.add()
            yield thing

    monkeypatch.setattr(Turns, "each", counted)
    return turn


@asynccontextmanager
async def serving(queues: int = 0, **options: Any) -> Any:
    async with Broker(http_port=0, **options) as broker:
        for number in range(queues):
            broker.declare_queue(f"queue {number}")
        timeout = aiohttp.ClientTimeout(sock_read=60)
        async with aiohttp.ClientSession(broker.http_url, timeout=timeout) as session:
            yield broker, session


def test_E9_requests_about_thousands_of_queues_are_handled_in_slices_of_at_most_500_objects(turn: Turn) -> None:
    async def main() -> None:
        async with serving() as (_, session):
            turn.begin()

            async def get(path: str, objects: int) -> bytes:
                before = turn.total
                async with session.get(path) as answer:
                    assert answer.status == 200
                    body: bytes = await answer.read()
                assert turn.total - before >= objects
                return body

            document = {"queues": [{"name": f"queue {number}"} for number in range(QUEUES)]}
            document["bindings"] = [{"source": "amq.fanout", "destination": "queue 7"}]
            async with session.post("/api/definitions", json=document) as answer:
                assert (answer.status, (await answer.json())["queues"]) == (200, QUEUES)
            # Each queue is counted once when it is read and once when it is declared.
            assert turn.total >= 2 * QUEUES
            assert len(json.loads(await get("/api/queues", QUEUES))) == QUEUES
            assert len(json.loads(await get("/api/definitions", 2 * QUEUES))["queues"]) == QUEUES
            assert json.loads(await get("/api/counters", QUEUES))["queues"] == QUEUES
            assert len(json.loads(await get("/api/flow-states", QUEUES))["queues"]) == QUEUES
            assert (await get("/metrics", QUEUES)).count(b'qflow_queue_messages{queue="') == QUEUES
            # Two simultaneous requests share one slice in each turn.
            await asyncio.gather(get("/api/queues", QUEUES), get("/metrics", QUEUES))
            before = turn.total
            async with session.get("/api/events") as stream:
                assert len((await next_event(stream.content.iter_any()))["queues"]) == QUEUES
            assert turn.total - before >= 2 * QUEUES
            assert turn.most <= Turns.MOST

    asyncio.run(main())


def test_E9_a_failed_import_of_definitions_that_took_several_slices_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Turns, "MOST", 1)

    async def main() -> None:
        async with serving() as (broker, session):
            broker.declare_queue("there")
            before = broker.queues(), broker.exchanges(), broker.bindings()
            document = {
                "exchanges": [{"name": "e", "type": "fanout"}],
                "queues": [{"name": "there"}, {"name": "new"}],
                "bindings": [
                    {"source": "e", "destination": "there"},
                    {"source": "amq.fanout", "destination": "there"},
                    {"source": "e", "destination": "none"},
                ],
            }
            async with session.post("/api/definitions", json=document) as answer:
                assert (answer.status, (await answer.json())["errors"][0]["field"]) == (400, "bindings[2]")
            assert (broker.queues(), broker.exchanges(), broker.bindings()) == before

    asyncio.run(main())


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        (b"", ""),
        (b"{", ""),
        (b'{"queues": [', ""),
        (b'{"queues": [] "x": 1}', ""),
        (b'{"queues": []} {}', ""),
        (b"{1: 2}", ""),
        (b'{"x": NaN}', ""),
        (b'{"x": ' + b"[" * 100_000, ""),
        (b"[]", ""),
        (b"\xff", ""),
        (b'{"queues": {}}', "queues"),
        (b'{"queues": [{"name": "a"}, {"name": 7}]}', "queues[1].name"),
        (b'{"queues": [{"name": "a", "arguments": {"x": NaN}}]}', ""),
    ],
)
def test_an_import_of_invalid_definitions_is_answered_with_400_and_the_name_of_the_field(
    raw: bytes, field: str
) -> None:
    async def main() -> None:
        async with serving() as (broker, session):
            headers = {"Content-Type": "application/json"}
            async with session.post("/api/definitions", data=raw, headers=headers) as answer:
                assert (answer.status, [each["field"] for each in (await answer.json())["errors"]]) == (400, [field])
            assert broker.queues() == ()

    asyncio.run(main())


def test_E9_at_most_one_request_without_a_token_is_handled_in_each_turn_of_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turn = Turn()

    def check(*_: object) -> None:
        turn.add()

    monkeypatch.setattr(server, "check_origin", check)

    async def main() -> None:
        async with serving(http_token="a-long-token") as (_, session):
            turn.begin()

            async def stranger() -> None:
                for _ in range(20):
                    async with session.get("/api/health") as answer:
                        assert answer.status == 200

            await asyncio.gather(*(stranger() for _ in range(20)))
        assert (turn.total, turn.most) == (400, 1)

    asyncio.run(main())


async def next_event(stream: Any) -> Any:
    text = b""
    async for piece in stream:
        text += piece
        if piece.endswith(b"}\n\n"):
            return json.loads(text.partition(b"data: ")[2])
    raise AssertionError


def counted(monkeypatch: pytest.MonkeyPatch, place: Any, name: str) -> Callable[[], int]:
    calls: list[Any] = []
    function = getattr(place, name)

    def counting(*args: Any) -> Any:
        calls.append(args)
        return function(*args)

    monkeypatch.setattr(place, name, counting)
    return lambda: len(calls)


def test_E9_each_changed_queue_is_encoded_only_once_for_a_hundred_event_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encodings = counted(monkeypatch, events, "encoded")
    comparisons = counted(monkeypatch, events, "_differ")
    monkeypatch.setattr(Watch, "SHARE", 1e9)
    queues = rounds(1000)

    async def main() -> None:
        async with Broker() as broker:
            for number in range(queues):
                broker.declare_queue(f"queue {number}")
            watch = Watch(broker, Turns())
            streams = [watch.events(0.001) for _ in range(100)]
            states = await asyncio.gather(*map(next_event, streams))
            assert {len(state["queues"]) for state in states} == {queues}
            # Each queue is encoded once, and each stream adds a few encodings.
            assert encodings() < queues + 100 * 30
            looks, words = comparisons(), encodings()
            for number in range(5):
                broker.publish(b"x", f"queue {number}")
                await asyncio.sleep(0)
                for change in await asyncio.gather(*map(next_event, streams)):
                    assert [queue["name"] for queue in change["queues"]] == [f"queue {number}"]
            assert encodings() - words <= 5 * (1 + 100)
            assert comparisons() - looks <= 5 * queues
            for stream in streams:
                await stream.aclose()

    asyncio.run(main())


def test_E9_slow_and_fast_event_streams_report_objects_that_are_deleted_and_created_again() -> None:
    async def main() -> None:
        async with Broker() as broker:
            watch = Watch(broker, Turns())
            watch.SHARE = 1e9
            async with aclosing(watch.events(0.001)) as fast, aclosing(watch.events(0.001)) as slow:
                assert (await next_event(fast))["queues"] == (await next_event(slow))["queues"] == []
                for step in ("made", "gone", "made", "gone"):
                    if step == "made":
                        broker.declare_queue("q")
                    else:
                        broker.delete_queue("q")
                    await asyncio.sleep(0)
                    told = await next_event(fast)
                    assert ("queues" in told) is (step == "made")
                    assert told.get("gone") == (None if step == "made" else {"queues": ["q"]})
                assert (await next_event(slow))["gone"] == {"queues": ["q"]}
                broker.declare_queue("other")
                await asyncio.sleep(0)
                assert [(await next_event(each))["queues"][0]["name"] for each in (fast, slow)] == ["other"] * 2
                # The watch forgets a deleted object when all streams have reported it.
                assert list(watch._named["queues"]) == ["other"]

    asyncio.run(main())


@pytest.mark.parametrize("period", [1.0, 29.0, 60.0])
def test_an_event_stream_without_changes_sends_a_comment_every_15_s_whatever_its_period_is(
    period: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    polls: list[float] = []
    refresh = Watch._refresh

    async def timed(self: Watch) -> None:
        polls.append(asyncio.get_running_loop().time())
        await refresh(self)

    monkeypatch.setattr(Watch, "_refresh", timed)

    async def main() -> None:
        async with Broker() as broker, aclosing(Watch(broker, Turns()).events(period)) as stream:
            await next_event(stream)
            comments = [asyncio.get_running_loop().time()]
            for _ in range(9):
                assert (await anext(stream)).startswith(b":")
                comments.append(asyncio.get_running_loop().time())
        for times, seconds in ((comments, 15), (polls, period)):
            assert all(later - earlier == pytest.approx(seconds, abs=0.5) for earlier, later in pairwise(times))

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(main())


def test_E9_the_number_of_event_streams_is_limited_in_total_and_for_each_client_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(HttpServer, "MAX_STREAMS_OF_ADDRESS", 2)

    async def main() -> None:
        async with serving() as (_, session):
            open_streams = [await session.get("/api/events?period=0.1") for _ in range(2)]
            async with session.get("/api/events") as answer:
                assert answer.status == 429
                assert "2 from one address" in (await answer.json())["detail"]
            for stream in open_streams:
                stream.close()
            # This is sooner than the next keep-alive write of an idle stream, which would also notice the end.
            async with asyncio.timeout(10):
                while True:
                    async with session.get("/api/events?period=0.1") as answer:
                        if answer.status == 200:
                            break
                    await asyncio.sleep(0.01)
            monkeypatch.setattr(HttpServer, "MAX_STREAMS", 0)
            async with session.get("/api/events") as answer:
                assert answer.status == 429

    asyncio.run(main())


def test_the_json_of_an_empty_iterator_is_an_empty_list() -> None:
    assert asyncio.run(documents.encode(iter(()), Turns())) == b"[]"


def hold_answers(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Send answers of more than 1,000 bytes in pieces. No piece is written until the returned event is set."""
    taken = asyncio.Event()
    write = web.StreamResponse.write

    async def slow(response: web.StreamResponse, data: Any) -> None:
        await taken.wait()
        await write(response, data)

    monkeypatch.setattr(web.StreamResponse, "write", slow)
    monkeypatch.setattr(HttpServer, "PIECE", 1000)
    return taken


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while True:
            if condition():
                return
            await asyncio.sleep(0.001)


def test_E9_large_unread_http_answers_are_limited_and_counted_as_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        taken = hold_answers(monkeypatch)
        async with serving(queues=10, memory_limit=1 << 26) as (broker, session):
            journal = broker._host.journal
            async with session.get("/api/queues") as first:
                assert first.status == 200
                assert journal.answers == journal.held == first.content_length > 1000
                monkeypatch.setattr(HttpServer, "MAX_ANSWERS", first.content_length + 1000)
                async with session.get("/api/queues") as second:
                    assert (second.status, second.headers["Retry-After"]) == (503, "10")
                    assert f"answers of {first.content_length} bytes are being sent" in await second.text()
                taken.set()
                assert len(await first.json()) == 10
            # The first answer has been sent, so it no longer counts.
            async with session.get("/api/queues") as second:
                assert (second.status, len(await second.json())) == (200, 10)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("limit", "most", "way_out"),
    [
        (0, 1 << 18, None),
        (1 << 20, 1 << 20, ", a quarter of memory_limit=1048576; raise memory_limit, or delete objects"),
        (1 << 21, 1 << 18, "; request single objects, or delete objects"),
    ],
)
def test_E9_an_http_answer_that_needs_more_than_a_quarter_of_the_memory_limit_is_refused_with_503(
    monkeypatch: pytest.MonkeyPatch, limit: int, most: int, way_out: str | None
) -> None:
    async def main() -> None:
        hold_answers(monkeypatch).set()
        monkeypatch.setattr(HttpServer, "MAX_ANSWERS", most)
        async with serving(queues=500, memory_limit=limit) as (_, session), session.get("/api/queues") as answer:
            text = await answer.text()
            assert (answer.status, answer.headers.get("Retry-After")) == (503 if limit else 200, None)
            assert way_out is None or f"at most 262144 bytes are sent at once{way_out}" in text

    asyncio.run(main())


def test_A1_a_publisher_paused_while_an_http_answer_uses_memory_continues_when_the_answer_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        taken = hold_answers(monkeypatch)
        async with serving(queues=350, memory_limit=1 << 20) as (broker, session):
            # The message needs less than 7/8 of the memory limit. With the answer, the whole limit is exceeded.
            broker.publish(bytes(880_000), "queue 0")
            async with AsyncProducer(broker.url, routing_key="queue 1") as producer, asyncio.timeout(10):
                await (await producer.send(b"before")).result()
                async with session.get("/api/queues") as answer:
                    await broker.wait_until_async(lambda broker: broker._server.is_paused)
                    receipt = await producer.send(b"while it is sent")
                    taken.set()
                    # Nothing else wakes the broker, because no other client sends anything.
                    await receipt.result()
                    assert answer.status == 200

    asyncio.run(main())


@pytest.mark.parametrize("why", ["it is gone", "it is slow"])
def test_E9_an_http_client_that_does_not_read_its_answer_is_disconnected_without_an_error_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    async def main() -> None:
        taken = hold_answers(monkeypatch)
        async with serving(queues=10, memory_limit=1 << 26) as (broker, session):
            if why == "it is slow":
                monkeypatch.setattr(HttpServer, "ANSWER_TIME", 0.01)
            answer = await session.get("/api/queues")
            if why == "it is gone":
                answer.close()
                await until(lambda: not broker._http._connections)
                taken.set()
            else:
                with pytest.raises(aiohttp.ClientPayloadError):
                    await answer.read()
            await until(lambda: not broker._host.journal.answers)

    asyncio.run(main())
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_E9_large_http_answers_are_generated_one_at_a_time_and_small_answers_do_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        making: list[int] = []
        has_begun, is_made = asyncio.Event(), asyncio.Event()

        async def slow(value: Any, turns: Turns) -> bytes | bytearray:
            if not isinstance(value, Iterator):
                return await documents.encode(value, turns)
            making.append(1)
            has_begun.set()
            await is_made.wait()
            return b"[]"

        async with serving() as (broker, session):
            broker.declare_queue("q")
            monkeypatch.setattr(server, "encode", slow)
            asked = [asyncio.create_task(session.get("/api/queues")) for _ in range(2)]
            await has_begun.wait()
            # These requests are answered meanwhile. The first answer is already encoded.
            for path in ("/api/openapi.json", "/api/queues/q", "/api/counters"):
                async with session.get(path) as answer:
                    assert answer.status == 200
            assert len(making) == 1
            # No answer is generated for a client that disconnects while its request waits.
            _, writer = await asyncio.open_connection(*("127.0.0.1", int(broker.http_url.rpartition(":")[2])))
            writer.write(b"GET /api/queues HTTP/1.1\r\nHost: localhost\r\n\r\n")
            lock = broker._http._making
            await until(lambda: len(lock._waiters or ()) == 2)
            connections = len(broker._http._connections)
            writer.transport.abort()
            await until(lambda: len(broker._http._connections) < connections)
            is_made.set()
            for each in asked:
                async with await each as answer:
                    assert await answer.read() == b"[]"
            assert len(making) == 2

    asyncio.run(main())


def test_E9_an_http_request_is_completed_even_if_its_client_disconnects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_is_gone", lambda request: True)

    async def main() -> None:
        async with serving() as (broker, session):
            async with session.post("/api/producers/stop") as answer:
                assert answer.status == 204
            assert broker.producers_stopped

    asyncio.run(main())
