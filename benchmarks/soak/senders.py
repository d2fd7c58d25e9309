"""The two publishing processes of a soak test: threads with `Producer`, and tasks with `AsyncProducer`.

Each sender numbers its messages. It records the outcome of each message, and the return time of each call with a
deadline. Threads and tasks run the same code: a thread also runs a coroutine. In a thread the coroutine never waits,
because its calls block.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from random import Random
from typing import Any

from benchmarks.soak.audit import ACCEPTED, REFUSED, Journal, Overruns
from benchmarks.soak.history import History
from benchmarks.soak.messages import body_of, whose
from qflow_client import (
    AsyncProducer,
    ConfirmTimeout,
    DeliveryError,
    Message,
    Outcome,
    Producer,
    ProducerFlowed,
    Receipt,
)
from qflow_client.core.settling import Settling

__all__ = ["Found", "Job", "run_tasks", "run_threads"]

# Seconds between two reports of a process.
_REPORT = 0.5
# Possible timeouts of sends in seconds; None for no timeout.
_TIMEOUTS = (0.02, 0.1, 0.3, 1.0, 3.0, None)
# Possible timeouts of other calls in seconds.
_WAITS = (0.01, 0.1, 0.5)
# Maximum number of receipts that a sender keeps before it waits for the oldest receipt.
_KEPT = 2000
# Maximum seconds for which a sender waits for the oldest receipt.
_LONG_WAIT = 60.0

_monotonic = time.monotonic


@dataclass(frozen=True, slots=True)
class Job:
    """The job of one process.

    Attributes:
        urls: URLs of the broker's nodes, through their proxies.
        first_sender: number of the first sender of the process.
        senders: number of threads or tasks.
        producers: number of producers that the threads or tasks share.
        rate: approximate messages per second in total while the producers are not held.
        patience: maximum seconds until all messages are settled at the end.
        more: additional settings of producers for this broker.
        history: history file of the process; None for no file.
        many: number of messages of one `send_many`.
    """

    urls: tuple[str, ...]
    routing_key: str
    first_sender: int
    senders: int
    producers: int
    rate: float
    seed: int
    patience: float
    more: Mapping[str, Any]
    history: str | None = None
    many: int = 5

    def settings(self, index: int) -> dict[str, Any]:
        """Return the settings of a producer. Four consecutive producers have different capacities."""
        return {
            "routing_key": self.routing_key,
            "capacity": (10, 100, 1000, "auto")[index % 4],
            "name": f"soak-{self.first_sender}-{index}",
            "reconnect_delay": 0.05,
            "reconnect_delay_max": 1.0,
            **self.more,
        }


@dataclass(slots=True)
class Found:
    """The results of one process.

    Attributes:
        overruns: late calls outside of senders.
        troubles: forbidden events, such as an undocumented exception.
        confirmed: approximate number of confirmed messages, for the progress.
    """

    journals: list[Journal]
    overruns: Overruns = field(default_factory=Overruns)
    troubles: list[str] = field(default_factory=list)
    confirmed: int = 0

    @classmethod
    def of(cls, job: Job) -> Found:
        return cls([Journal(job.first_sender + index) for index in range(job.senders)])

    def teller(self, history: History) -> Callable[[Receipt], None]:
        """Return a function that records the outcome of a message, also in the history."""

        def told(receipt: Receipt) -> None:
            at = _monotonic()
            outcome = receipt.outcome
            assert outcome is not None
            # `receipt.message` makes a copy, which costs more than the rest of this function.
            sender, number = whose(receipt.message.body)
            self.journals[sender - self.journals[0].sender].told(number, outcome)
            self.confirmed += outcome is Outcome.CONFIRMED
            history.write("settled", sender=sender, number=number, outcome=outcome, end=at)

        return told

    def note_nacks(self, history: History) -> None:
        """From now on, record the nacked messages of this process that a later message may overtake."""
        answer = Settling.answer

        def answer_and_note(settling: Settling, tag: int, multiple: bool, outcome: Outcome, now: float) -> None:
            if outcome is Outcome.NACKED:
                at = _monotonic()
                flight = settling._unconfirmed.flight
                # The highest message number of each sender with a later tag. A retried message has a new tag.
                highest: dict[int, int] = {}
                for each in reversed(tuple(flight)):
                    sender, number = whose(flight[each].message.body)
                    is_nacked = each == tag or (multiple and (tag == 0 or each < tag))
                    above = highest.get(sender, 0)
                    highest[sender] = max(above, number)
                    if above > number and is_nacked:
                        self.journals[sender - self.journals[0].sender].overtaken.add(number)
                        history.write("nacked", sender=sender, number=number, end=at)
            answer(settling, tag, multiple, outcome, now)

        Settling.answer = answer_and_note  # type: ignore[assignment,method-assign]  # on purpose

    def trouble(self, who: str, error: BaseException) -> None:
        logging.getLogger(__name__).error("%s", who, exc_info=error)
        self.troubles.append(f"{who}: {type(error).__name__}: {error}")


class _Sender:
    """One thread or task.

    Args:
        found: results of the process.
        rest: function that waits for some seconds, or until it is time to stop. It returns whether it is time to stop.
    """

    def __init__(
        self, job: Job, found: Found, history: History, index: int, producer: Any, rest: Callable[[float], Any]
    ) -> None:
        self._found = found
        self._history = history
        self._told = found.teller(history)
        self._journal = found.journals[index]
        self._producer = producer
        self._waits = isinstance(producer, AsyncProducer)
        self._rest = rest
        self._random = Random(f"{job.seed} {self._journal.sender}")
        self._many = job.many
        self._pace = job.senders / job.rate * _messages_of_a_step(job.many)
        # Receipts to check; None if `on_delivery` gets the outcomes.
        self._kept: deque[Any] | None = None if _is_told(index % job.producers) else deque()

    async def _come(self, result: Any) -> Any:
        """Return the result of a producer's method, or of `rest`."""
        return await result if self._waits else result

    async def run(self) -> None:
        try:
            while not await self._come(self._rest(self._random.expovariate(1 / self._pace))):
                await self._step()
                self.harvest()
                if self._kept is not None and len(self._kept) > _KEPT:
                    await self._result(self._kept[0], _LONG_WAIT)
        except BaseException as error:
            self._found.trouble(f"sender {self._journal.sender}", error)

    async def _step(self) -> None:
        chance, producer = self._random, self._producer
        timeout, wait = chance.choice(_TIMEOUTS), chance.choice(_WAITS)
        what = chance.randrange(1000)
        if what < 850:
            with self._sending(1, timeout) as (receipts, messages):
                receipts.append(await self._come(producer.send(messages[0], timeout=timeout)))
        elif what < 900:
            with self._sending(1, None) as (receipts, messages):
                receipts.append(producer.send_nowait(messages[0]))
        elif what < 930:
            # Each message gets the whole timeout.
            with self._sending(self._many, None) as (receipts, messages):
                receipts += await self._come(producer.send_many(messages, timeout=timeout))
        elif what < 950:
            with self._deadline("flush", wait):
                await self._come(producer.flush(timeout=wait))
        elif what < 970:
            with self._deadline("wait_unflowed", wait):
                await self._come(producer.wait_unflowed(wait))
        elif what < 990:
            if self._kept:
                await self._result(self._kept[-1], wait)
        elif what < 995:
            producer.capacity = chance.choice((1, 10, 100, 1000))
        else:
            producer.pause("soak")
            try:
                await self._come(self._rest(wait))
            finally:
                producer.resume()

    async def _result(self, receipt: Any, timeout: float) -> None:
        with self._deadline("result", timeout):
            await self._come(receipt.result(timeout))

    def _message(self, number: int) -> bytes | Message:
        body = body_of(self._journal.sender, number)
        return Message(body, headers={"number": number}) if number % 3 == 0 else body

    @contextlib.contextmanager
    def _sending(self, count: int, timeout: float | None) -> Iterator[tuple[list[Receipt], list[bytes | Message]]]:
        """Record a call that sends `count` messages, and the receipts of these messages."""
        journal = self._journal
        first = journal.begin(count)
        receipts: list[Receipt] = []
        messages = [self._message(number) for number in range(first, first + count)]
        due = None if timeout is None else _monotonic() + timeout
        about = {"sender": journal.sender, "first": first, "count": count, "timeout": timeout}
        try:
            with self._history.calling("send", **about) as call:
                call.about["admitted"] = 0
                try:
                    yield receipts, messages
                except ProducerFlowed as error:
                    receipts += error.receipts
                    raise
                finally:
                    call.about["admitted"] = len(receipts)
        except ProducerFlowed:
            # The admitted messages have been recorded above.
            pass
        finally:
            if due is not None:
                journal.overruns.note(due, _monotonic())
            for at in range(count):
                journal.called(first + at, ACCEPTED if at < len(receipts) else REFUSED)
            if self._kept is not None:
                self._kept += receipts

    @contextlib.contextmanager
    def _deadline(self, what: str, timeout: float) -> Iterator[None]:
        due = _monotonic() + timeout
        try:
            with self._history.calling(what, sender=self._journal.sender, timeout=timeout):
                yield
        except (ConfirmTimeout, DeliveryError):
            # The outcomes of the messages are recorded later.
            pass
        finally:
            self._journal.overruns.note(due, _monotonic())

    def harvest(self) -> None:
        """Record the outcomes of the kept receipts that are settled."""
        while self._kept and self._kept[0].done:
            self._told(self._kept.popleft())


def _messages_of_a_step(many: int) -> float:
    """Return the average number of messages that one call of `_Sender._step` sends."""
    return 0.9 + 0.03 * many


def _is_told(index: int) -> bool:
    """Whether a producer with this index has an `on_delivery`."""
    return index % 2 == 1


def _prepare() -> None:
    # The parent process sends this signal to get the stacks of a hanging process.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # Only the parent handles Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Lost connections are expected here.
    for name in ("pika", "aio_pika", "aiormq", "qflow_client"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _report(pipe: Connection, found: Found, producers: Sequence[Producer | AsyncProducer]) -> None:
    """Report to the parent that all senders publish, and then their progress, until the parent says stop."""
    pipe.send(None)
    while not pipe.poll(_REPORT):
        pipe.send((found.confirmed, sum(producer.unsettled for producer in producers)))
    pipe.recv()


@contextlib.contextmanager
def _closing(job: Job, found: Found, history: History, producer: Any) -> Iterator[float]:
    due = _monotonic() + job.patience
    try:
        with history.calling("close", sender=job.first_sender, timeout=job.patience):
            yield job.patience
    except Exception as error:
        found.trouble(producer.name, error)
    finally:
        found.overruns.note(due, _monotonic())


def run_threads(pipe: Connection, job: Job) -> None:
    """Publish from threads until the parent says stop. Then settle all messages, and send the results."""
    _prepare()
    found, history = Found.of(job), History(job.history)
    found.note_nacks(history)
    told = found.teller(history)
    producers = [
        Producer(job.urls, on_delivery=told if _is_told(index) else None, **job.settings(index))
        for index in range(job.producers)
    ]
    stop = threading.Event()
    senders = [_Sender(job, found, history, at, producers[at % job.producers], stop.wait) for at in range(job.senders)]
    threads = [threading.Thread(target=_drive, args=(sender.run(),), name="sender") for sender in senders]
    for thread in threads:
        thread.start()
    _report(pipe, found, producers)
    stop.set()
    for thread in threads:
        thread.join()
    for producer in producers:
        with _closing(job, found, history, producer) as patience:
            producer.close(patience)
    for sender in senders:
        sender.harvest()
    history.close()
    pipe.send(found)


def _drive(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that never waits."""
    with contextlib.suppress(StopIteration):
        coroutine.send(None)


def run_tasks(pipe: Connection, job: Job) -> None:
    """Publish from tasks until the parent says stop. Then settle all messages, and send the results."""
    _prepare()
    found, history = Found.of(job), History(job.history)
    found.note_nacks(history)
    asyncio.run(_tasks(pipe, job, found, history))
    history.close()
    pipe.send(found)


async def _tasks(pipe: Connection, job: Job, found: Found, history: History) -> None:
    told = found.teller(history)
    producers = [
        AsyncProducer(job.urls, on_delivery=told if _is_told(index) else None, **job.settings(index))
        for index in range(job.producers)
    ]
    for producer in producers:
        await producer.connect()
    stop = asyncio.Event()

    async def rest(seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), seconds)
        return stop.is_set()

    senders = [_Sender(job, found, history, at, producers[at % job.producers], rest) for at in range(job.senders)]
    tasks = [asyncio.create_task(sender.run()) for sender in senders]
    await asyncio.to_thread(_report, pipe, found, producers)
    stop.set()
    await asyncio.gather(*tasks)
    for producer in producers:
        with _closing(job, found, history, producer) as patience:
            await producer.close(patience)
    for sender in senders:
        sender.harvest()
