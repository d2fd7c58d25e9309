"""Creates the lines that a `FlowLog` would write for simulated producers and queues."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from qflow_client.broker.policies.recording import FlowRecorder
from qflow_client.flow import StopResume
from qflow_client.flowlog import ProducerLines, microseconds
from qflow_client.report.replay import Replay

from .life import Life

__all__ = ["BusyLife", "QueueLife", "lines_of"]

#: Wall-clock time at which the simulated clock is 0, in seconds since 1970.
EPOCH = 1_790_000_000.0

_PAYLOADS = (b"x", b"x" * 100, b"x" * 1000)

Write = Callable[[dict[str, Any]], object]


class BusyLife(Life):
    """A simulated producer that the broker and an operator often block and unblock, without comparison to the model.

    Args:
        seed: seed of all random events.
        write: function that gets each line of the flow log.
    """

    #: Maximum number of waiting sends.
    LINE = 2

    def do_send(self) -> None:
        if len(self.line) < self.LINE:
            super().do_send()

    STEPS = (
        (do_send, 6),
        (Life.do_drain, 3),
        (Life.do_answer, 6),
        (Life.do_flow, 24),
        (Life.do_block, 20),
        (Life.do_pause, 20),
    )

    def __init__(self, seed: int, write: Write) -> None:
        super().__init__(seed)
        self.protocol.reports._wall_offset = EPOCH
        self._actions = [do for do, _ in self.STEPS]
        self._weights = [sum(weight for _, weight in self.STEPS[: at + 1]) for at in range(len(self.STEPS))]
        self.lines = ProducerLines(f"producer-{seed:03}", f"queue-{seed % 7}", write, microseconds(self.now + EPOCH))

    def payload(self) -> bytes:
        return _PAYLOADS[self.random.randrange(3)]

    def compare(self) -> None:
        self.line_moves()

    def step(self) -> None:
        do = self.random.choices(self._actions, cum_weights=self._weights)[0]
        do(self)
        self.line_moves()
        self.pass_time()
        self.line_moves()
        protocol = self.protocol
        if protocol.reports.events:
            for event in protocol.reports.events:
                self.lines.event(event)
            protocol.reports.events.clear()
        protocol.reports.wake.clear()


class QueueLife:
    """A simulated queue of the broker, with publishers that send bursts, and a consumer whose rate changes.

    Args:
        seed: seed of all random events.
        write: function that gets each line of the flow log.
        stop: stop threshold in messages.
        resume: resume threshold in messages.
        capacity: capacity of each publisher in messages.
        publishers: number of publishers.
    """

    def __init__(
        self, seed: int, write: Write, *, stop: int = 12, resume: int = 6, capacity: int = 5, publishers: int = 3
    ) -> None:
        self.random = Random(seed)
        names = [f"producer-{seed + at:03}" for at in range(publishers)]
        self.replay = Replay(
            StopResume(stop, resume),
            dict.fromkeys(names, capacity),
            name=f"queue-{seed % 7}",
            recorder=lambda clock: FlowRecorder(write, clock, lambda: clock() + EPOCH),
            begin=1000.0,
            round_trip=0.05,
        )
        self.names = names
        self.rate = 4.0
        self.tick_at = self.replay.around.now

    def step(self) -> None:
        random = self.random
        arrivals = {}
        if random.random() < 0.2:
            arrivals[random.choice(self.names)] = random.choice((1, 5, 10, 20))
        if random.random() < 0.01:
            self.rate = random.choice((0.5, 2.0, 4.0, 8.0))
        self.replay.step(arrivals, self.rate)
        recorder = self.replay.recorder
        assert recorder is not None
        if self.replay.around.now >= self.tick_at:
            self.tick_at += recorder.period
            recorder.tick(self.replay.around.now)


def lines_of(seeds: range, count: int, *, queues: bool = True) -> Iterator[dict[str, Any]]:
    """Yield lines of several simulations that run in turn. Every fourth simulation is a queue; the rest are producers.

    Args:
        seeds: a seed for each simulation.
        count: number of lines to yield.
        queues: whether to simulate queues.
    """
    lines: list[dict[str, Any]] = []
    lives: list[BusyLife | QueueLife] = [
        QueueLife(seed, lines.append) if queues and seed % 4 == 3 else BusyLife(seed, lines.append) for seed in seeds
    ]
    given = 0
    while True:
        for life in lives:
            for _ in range(50):
                life.step()
        for line in lines:
            if given == count:
                return
            given += 1
            yield line
        lines.clear()
