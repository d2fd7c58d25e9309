"""``qflow demo``: two fast producers, a slow consumer, and a queue that does not overflow."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from qflow_client.broker import Broker, Enforcement
from qflow_client.cli import text
from qflow_client.cli.demo.actors import Failed, consume, produce
from qflow_client.cli.demo.audit import ConsumerTally, ProducerTally, QueueTally, Run, audit, to_json
from qflow_client.cli.demo.flights import FLIGHTS, open_flights
from qflow_client.cli.demo.view import Scene, audit_table, progress_line
from qflow_client.cli.errors import CommandError
from qflow_client.cli.output import AsJson, print_json
from qflow_client.cli.stopping import Stopped, Stopping

__all__ = ["demo"]

QUEUE = "flights"
# Thresholds in messages. These and `CAPACITIES` are the numbers of an example in the documentation of Qpid C++ (C6).
STOP, RESUME = 100, 70
ARGUMENTS = {"qpid.flow_stop_count": STOP, "qpid.flow_resume_count": RESUME}
CAPACITIES = (50, 15)
# Messages per second. At this rate the consumer needs one minute for all flights.
RATE = 5_600.0
# Seconds between two checks of the queue, two updates of the display, two columns of the chart, and two lines of text.
# Without a terminal the command prints lines of text instead of the display.
_CHECK_PERIOD, _FRAME_PERIOD, _COLUMN_PERIOD, _LINE_PERIOD = 0.02, 0.1, 0.2, 5.0
# If all producers are held and the queue does not change for this number of seconds, the consumer starts.
_UNCHANGED_FOR = 0.5
# If neither the queue nor the consumer's report changes for this number of seconds, the run fails.
_FAIL_AFTER = 30.0


@dataclass(slots=True)
class _Actor:
    """A process of the demonstration. It sends reports through `reports`. The consumer also receives commands there."""

    process: multiprocessing.process.BaseProcess
    reports: Connection
    # Whether the process has closed the pipe after its last report.
    ended: bool = False

    def latest(self) -> Any:
        """Return the latest unread report, or ``None``. Raise `CommandError` if the process has failed."""
        report = None
        while not self.ended and self.reports.poll():
            try:
                report = self.reports.recv()
            except (EOFError, ConnectionResetError):
                self.ended = True
            if isinstance(report, Failed):
                raise CommandError(f"the {self.process.name} failed: {report}")
        return report


@contextmanager
def _actor(name: str, body: Callable[..., None], *arguments: object) -> Iterator[_Actor]:
    """Run `body` in a process. If the block succeeds, the process has one second to end before it is terminated."""
    # A forked process would inherit the broker's sockets and locks.
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=body, args=(*arguments, theirs), name=name, daemon=True)
    process.start()
    theirs.close()
    try:
        yield _Actor(process, ours)
        process.join(1.0)
    finally:
        process.terminate()
        process.join()
        ours.close()


class _Stage:
    def __init__(
        self, broker: Broker, enforcement: Enforcement, messages: int, producers: _Actor, consumer: _Actor
    ) -> None:
        self._broker = broker
        self._enforcement = enforcement
        self._producers = producers
        self._consumer = consumer
        self.run = Run(messages, (), ConsumerTally(), self._queue())
        #: Text for the display that describes what now happens in the demonstration.
        self.note = "no consumer yet: the queue fills to its stop threshold"
        self._moved_at = time.monotonic()

    def _queue(self) -> QueueTally:
        queue = self._broker.queue(QUEUE)
        return QueueTally(
            self._enforcement,
            STOP,
            RESUME,
            queue.depth,
            queue.peak_depth,
            queue.flow_stopped,
            queue.flow_stopped_count,
        )

    def look(self) -> None:
        """Update `run`. Raise `CommandError` if a process has failed, or nothing changes for `_FAIL_AFTER` seconds."""
        producers: Sequence[ProducerTally] = self._producers.latest() or self.run.producers
        consumer: ConsumerTally = self._consumer.latest() or self.run.consumer
        before = self.run
        self.run = Run(before.messages, producers, consumer, self._queue())
        now = time.monotonic()
        if (consumer, self.run.queue) != (before.consumer, before.queue) or len(producers) != len(before.producers):
            self._moved_at = now
        elif now - self._moved_at > _FAIL_AFTER:
            raise CommandError(f"nothing has changed for {_FAIL_AFTER:.0f} s: {progress_line(self.run, self.note, 0)}")

    def play(self) -> Iterator[None]:
        """Play the demonstration. Update `run` before each yield, so that the caller can display `run`."""
        while not self._all_held() and not self._producers.ended:
            self.look()
            yield
        # Every producer is blocked, or all messages are sent.
        self._tell_consumer("begin")
        self.note = "the slow consumer takes what the broker lets the producers send"
        while not self._producers.ended or self.run.queue.depth:
            if self._consumer.ended:
                raise CommandError(f"the consumer has ended too early: {progress_line(self.run, self.note, 0)}")
            self.look()
            yield
        self._tell_consumer("end")
        self.note = "the results are collected"
        while not self._consumer.ended:
            self.look()
            yield

    def _tell_consumer(self, what: str) -> None:
        try:
            self._consumer.reports.send(what)
        except BrokenPipeError:
            raise CommandError("the consumer has ended too early") from None

    def _all_held(self) -> bool:
        producers = self.run.producers
        if sum(producer.sent for producer in producers) == self.run.messages:
            return True
        held = self.run.queue.flow_stopped and bool(producers) and all(producer.holds for producer in producers)
        # Require that nothing has changed for a while, because a hold may last only for a moment.
        return held and time.monotonic() - self._moved_at >= _UNCHANGED_FOR


def _perform(
    messages: int, enforcement: Enforcement, rate: float, console: Console, stopping: Stopping
) -> tuple[Run, float]:
    """Run the demonstration, and return its result and its duration in seconds."""
    started = time.monotonic()
    with ExitStack() as stack:
        broker = stack.enter_context(Broker(enforcement=enforcement))
        broker.declare_queue(QUEUE, arguments=ARGUMENTS)
        producers = stack.enter_context(_actor("producers", produce, broker.url, QUEUE, CAPACITIES, messages))
        consumer = stack.enter_context(_actor("consumer", consume, broker.url, QUEUE, messages, rate))
        stage = _Stage(broker, enforcement, messages, producers, consumer)
        scene = Scene(enforcement.value)
        live = None
        if console.is_terminal:
            live = stack.enter_context(Live(console=console, auto_refresh=False, transient=True))
        depths: list[int] = []
        next_picture = next_column = next_line = started
        with stopping.breakable():
            for _ in stage.play():
                now = time.monotonic()
                depths.append(stage.run.queue.depth)
                if now >= next_column:
                    next_column = now + _COLUMN_PERIOD
                    scene.add_column(depths)
                    depths.clear()
                if live is not None and now >= next_picture:
                    next_picture = now + _FRAME_PERIOD
                    live.update(scene.render(stage.run, stage.note, now - started), refresh=True)
                elif live is None and now >= next_line:
                    next_line = now + _LINE_PERIOD
                    console.print(progress_line(stage.run, stage.note, now - started), highlight=False, soft_wrap=True)
                time.sleep(_CHECK_PERIOD)
        if live is not None:
            # Keep the last frame on the terminal when `live` ends.
            live.transient = False
            live.update(scene.render(stage.run, "done", time.monotonic() - started), refresh=True)
        return stage.run, time.monotonic() - started


def demo(
    # The minimum is more than the worst-case depth, 165, so both producers are blocked before the consumer starts.
    messages: Annotated[
        int,
        typer.Option(
            "--messages",
            "-n",
            metavar="NUMBER",
            min=200,
            max=FLIGHTS,
            show_default=False,
            help="Number of flights to send (default: 336776, all).",
        ),
    ] = FLIGHTS,
    enforcement: Annotated[
        Enforcement,
        typer.Option(
            help="How the queue blocks the producers: channel_flow sends Channel.Flow, completion delays confirms, "
            "both does both (default: both).",
            show_default=False,
        ),
    ] = Enforcement.BOTH,
    consumer_rate: Annotated[
        float,
        typer.Option(
            metavar="NUMBER",
            min=1,
            show_default=False,
            help="Maximum number of messages per second for the consumer (default: 5600).",
        ),
    ] = RATE,
    as_json: AsJson = False,
) -> None:
    """Show fast producers, a slow consumer and a bounded queue.

    The messages are the flights from New York in 2013.

    The broker runs in this process. Its queue has a stop threshold of 100 messages and a resume threshold of 70. Two
    producers, with capacities 50 and 15, publish as fast as they can. The consumer is slower, and starts late. At the
    end an audit checks that no message was lost or delivered twice. It checks that the queue never had more than 165
    messages, which is the stop threshold plus the capacities of the producers. It also checks that every producer was
    blocked (flowed), and later unblocked (unflowed).

    Exit codes: 0 if the audit passed; 1 if it failed; 130 or 143 after Ctrl-C or SIGTERM.
    """
    console = Console(stderr=True, quiet=as_json)
    with Stopping() as stopping:
        # If the flights are not installed, fail now and not in a process of the demonstration.
        open_flights().__exit__(None, None, None)
        try:
            run, took = _perform(messages, enforcement, consumer_rate, console, stopping)
        except Stopped:
            assert stopping.signal is not None
            raise CommandError(f"interrupted by {stopping.signal.name}: no audit", stopping.exit_code) from None
    lines = audit(run)
    if as_json:
        print_json(to_json(run, lines, took))
    else:
        out = Console()
        total = text.count(run.messages, "message")
        out.print(f"{total} in {text.seconds(took)}, {text.rate(run.consumer.consumed, took)}\n", highlight=False)
        out.print(audit_table(lines))
    failed = [line for line in lines if not line.passed]
    if failed:
        words = "; ".join(f"{line.statement}: {line.measured}, {line.difference}" for line in failed)
        raise CommandError(f"the audit failed: {words}")
