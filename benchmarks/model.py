"""Simulates a simple broker: how it answers producers that publish as fast as their windows allow.

The model has the parts that matter for a window: the network delay, a bottleneck that takes messages in batches, a
store that commits in groups, and a queue that holds confirms between two marks. Time is simulated and random values
have a seed, so a run can be repeated exactly.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from qflow_client.flow import AdaptiveWindow, WindowLimiter

__all__ = ["Conditions", "Simulation"]

# The speed of the machine stays constant for this number of seconds.
_MOOD_LASTS = 0.05


@dataclass(frozen=True, slots=True)
class Conditions:
    """The properties of the broker and the network.

    Attributes:
        rate: messages per second of the bottleneck.
        delay: seconds of the network delay in each direction.
        overhead: additional seconds of each batch.
        batch: maximum messages that are taken and answered together.
        commit: seconds of a commit, after which all committed messages are answered; 0 for no commits.
        mood: standard deviation of the logarithm of a random factor of all durations; the factor changes every 50 ms.
        preempted: share of the batches before which the broker waits for the CPU.
        turn: average seconds for which the broker waits for the CPU.
        stop: depth above which the queue holds confirms (Qpid C++); 0 for never.
        resume: depth below which the queue releases the held confirms. Until then, only consumed messages are
            confirmed.
        consumed: messages per second that leave the queue; ``None`` for no queue.
    """

    rate: float = 60_000.0
    delay: float = 0.0005
    overhead: float = 0.0
    batch: int = 8
    commit: float = 0.0
    mood: float = 0.0
    preempted: float = 0.0
    turn: float = 0.0
    stop: int = 0
    resume: int = 0
    consumed: float | None = None


class Simulation:
    """Producers with one window each, and the broker.

    Args:
        conditions: properties of the broker and the network; the caller can replace them during the run.
        backlog: messages that each producer has to send from the start; unlimited by default.
    """

    def __init__(
        self, conditions: Conditions, windows: Sequence[WindowLimiter], *, seed: int = 1, backlog: float = math.inf
    ) -> None:
        self.conditions = conditions
        self.windows = windows
        #: Seconds since the start.
        self.now = 0.0
        #: Number of confirmed messages of each producer.
        self.confirmed = [0] * len(windows)
        #: Number of messages that each producer still has to send.
        self.backlog = [backlog] * len(windows)
        #: Maximum messages in the queue since this was last set to 0.
        self.peak = 0
        self._random = Random(seed)
        self._mood = 1.0
        self._mood_ends = 0.0
        # Future events in order. The number decides the order of events with equal times.
        self._agenda: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0
        # Producers and numbers of messages that wait for the bottleneck.
        self._arrived: deque[tuple[int, int]] = deque()
        # Producers and numbers of messages that wait for a commit.
        self._uncommitted: list[tuple[int, int]] = []
        # For each message in the queue, the producer if the confirm is held, and otherwise None.
        self._queue: deque[int | None] = deque()
        self._busy = self._committing = self._consuming = self._on = False
        for producer in range(len(windows)):
            self.after(0.0, self._send, producer)

    @property
    def in_use(self) -> int:
        """The total capacity of all windows."""
        return sum(window.capacity for window in self.windows)

    def run(self, seconds: float) -> int:
        """Simulate some seconds, and return the number of messages that were confirmed in this time."""
        until = self.now + seconds
        before = sum(self.confirmed)
        agenda = self._agenda
        while agenda and agenda[0][0] <= until:
            self.now, _, what, arguments = heapq.heappop(agenda)
            what(*arguments)
        self.now = until
        return sum(self.confirmed) - before

    def after(self, seconds: float, what: Callable[..., None], *arguments: Any) -> None:
        self._number += 1
        heapq.heappush(self._agenda, (self.now + seconds, self._number, what, arguments))

    def offer(self, producer: int, count: int) -> None:
        self.backlog[producer] += count
        self._send(producer)

    # Producers.

    def _send(self, producer: int) -> None:
        window = self.windows[producer]
        count = 0
        while self.backlog[producer] > 0 and window.try_add(1, self.now) is None:
            self.backlog[producer] -= 1
            count += 1
        if count:
            self.after(self.conditions.delay, self._arrive, producer, count)

    def _confirm(self, producer: int, count: int) -> None:
        window = self.windows[producer]
        if isinstance(window, AdaptiveWindow):
            window.observe(count, self.now)
        window.remove(count, count)
        self.confirmed[producer] += count
        self._send(producer)

    # The broker.

    def _arrive(self, producer: int, count: int) -> None:
        self._arrived.append((producer, count))
        if not self._busy:
            self._work()

    def _work(self) -> None:
        room = self.conditions.batch
        batch = []
        while room and self._arrived:
            producer, count = self._arrived.popleft()
            taken = min(count, room)
            if taken < count:
                self._arrived.appendleft((producer, count - taken))
            batch.append((producer, taken))
            room -= taken
        self._busy = bool(batch)
        if batch:
            size = self.conditions.batch - room
            seconds = self.conditions.overhead + size / self.conditions.rate
            seconds *= self._work_takes()
            if self.conditions.preempted and self._random.random() < self.conditions.preempted:
                seconds += self._random.expovariate(1.0 / self.conditions.turn)
            self.after(seconds, self._worked, batch)

    def _work_takes(self) -> float:
        if self.conditions.mood and self.now >= self._mood_ends:
            self._mood = self._random.lognormvariate(0.0, self.conditions.mood)
            self._mood_ends = self.now + _MOOD_LASTS
        return self._mood

    def _worked(self, batch: list[tuple[int, int]]) -> None:
        for producer, count in batch:
            if self.conditions.consumed is None:
                self._answer(producer, count)
            else:
                for _ in range(count):
                    self._enqueue(producer)
        self._work()

    def _enqueue(self, producer: int) -> None:
        depth = len(self._queue) + 1
        self.peak = max(self.peak, depth)
        self._on = self._on or 0 < self.conditions.stop < depth
        self._queue.append(producer if self._on else None)
        if not self._on:
            self._answer(producer, 1)
        self._consume_later()

    def _consume_later(self) -> None:
        if self.conditions.consumed and self._queue and not self._consuming:
            self._consuming = True
            self.after(1.0 / self.conditions.consumed, self._consume)

    def _consume(self) -> None:
        self._consuming = False
        # A message that is dequeued is confirmed in every state of the queue (C5).
        settled = [self._queue.popleft()]
        if self._on and len(self._queue) < self.conditions.resume:
            self._on = False
            settled += self._queue
            self._queue = deque([None] * len(self._queue))
        for producer, count in self._by_producer([(each, 1) for each in settled if each is not None]):
            self._answer(producer, count)
        self._consume_later()

    def _answer(self, producer: int, count: int) -> None:
        if not self.conditions.commit:
            self.after(self.conditions.delay, self._confirm, producer, count)
            return
        self._uncommitted.append((producer, count))
        if not self._committing:
            self._commit()

    def _commit(self) -> None:
        waiting, self._uncommitted = self._uncommitted, []
        self._committing = bool(waiting)
        if waiting:
            self.after(self.conditions.commit, self._committed, waiting)

    def _committed(self, committed: list[tuple[int, int]]) -> None:
        for producer, count in self._by_producer(committed):
            self.after(self.conditions.delay, self._confirm, producer, count)
        self._commit()

    def _by_producer(self, runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
        counts = dict.fromkeys(range(len(self.windows)), 0)
        for producer, count in runs:
            counts[producer] += count
        return [(producer, count) for producer, count in counts.items() if count]
