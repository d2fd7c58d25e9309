"""Replays recorded messages through a `Queue` of the broker, with given thresholds and capacities, and without I/O.

Simulated time advances in steps of one round trip. At the start of a step, each publisher that the queue does not block
sends as many messages as its capacity allows. A publisher that publishes while the queue is ON stops at the next step.
So the queue may exceed its stop threshold, by at most the sum of the capacities (C6). The consumers then take as
many messages as they can. At the end of the step, the publishers get the confirms that the queue does not withhold.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from qflow_client.broker.core.entries import Address, Completion, StoredMessage
from qflow_client.broker.core.limits import QueueLimits
from qflow_client.broker.core.queue import Queue
from qflow_client.broker.core.settings import Enforcement
from qflow_client.broker.core.wire import encode_header
from qflow_client.broker.policies.recording import FlowRecorder
from qflow_client.flow import Capacity, FlowSource, StopResume

__all__ = ["Replay", "ReplayResult", "Sample", "Sender", "replay"]


@dataclass(frozen=True, slots=True)
class Sample:
    """The activity of a queue during a short time.

    Attributes:
        seconds: length of the sample in seconds.
        arrivals: number of messages that arrived from each publisher.
        left: number of messages that left the queue.
        was_busy: whether the queue had messages at the start and at the end of the sample. If so, the replay assumes
            that the consumers took as many messages as they could.
    """

    seconds: float
    arrivals: Mapping[str, int]
    left: int
    was_busy: bool


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The result of a replay.

    Attributes:
        stop: stop threshold in messages.
        resume: resume threshold in messages.
        peak: maximum number of messages in the queue.
        overshoot: by how many messages the peak exceeded the stop threshold.
        times_on: how often the queue turned ON.
        seconds_flowed: sum over all publishers of the seconds for which the queue kept them from sending messages.
        seconds_full: sum over all publishers of the seconds for which only their capacity kept them from sending.
        delay: maximum seconds that a consumed message was in the queue.
        sent: number of published messages.
        unsent: number of messages that the publishers still had to publish at the end of the replay.
        seconds: length of the replay in seconds of simulated time.
    """

    stop: int
    resume: int
    capacities: Mapping[str, int]
    peak: int
    overshoot: int
    times_on: int
    seconds_flowed: float
    seconds_full: float
    delay: float
    sent: int
    unsent: int
    seconds: float

    @property
    def seconds_held(self) -> float:
        """Sum over all publishers of the seconds for which the queue or their capacity kept them from sending."""
        return self.seconds_flowed + self.seconds_full


class Sender(FlowSource):
    """A publisher with a capacity."""

    __slots__ = ("capacity", "flowed", "full", "to_send", "unconfirmed")

    def __init__(self, name: str, capacity: int) -> None:
        super().__init__(name)
        self.capacity = capacity
        self.to_send = 0
        #: Number of published messages that are not confirmed.
        self.unconfirmed = 0
        #: Number of round trips that ended with waiting messages: `flowed` if the queue blocked the publisher, `full`
        #: if the publisher had used its whole capacity.
        self.flowed = self.full = 0

    def confirm(self, _: int) -> None:
        """Receive a confirm that the queue had withheld."""
        self.unconfirmed -= 1


@dataclass(slots=True)
class _Alone:
    """Takes the place of the virtual host, because the replayed queue does not belong to a virtual host."""

    now: float = 0.0
    alarms: list[float] = field(default_factory=list)
    #: Maximum body bytes that the queue may read ahead from a store: 0, because the queue has no store.
    window: int = 0

    def clock(self) -> float:
        return self.now

    def wake_at(self, queue: Queue, at: float) -> None:
        """Do nothing, because the queue has no deadlines."""

    def run(self, work: Iterator[None]) -> None:
        """Do all of the work immediately."""
        deque(work, maxlen=0)

    def died(self, queue: Queue, message: StoredMessage, reason: object) -> None:
        """Do nothing, because the queue has no dead-letter exchange."""

    def note_surplus(self, queue: Queue, on: bool) -> None:
        """Do nothing, because the queue has no maximum."""

    def unused(self, queue: Queue) -> None:
        """Do nothing, because the queue does not expire."""

    def admit_waiting(self, queue: Queue, now: float) -> None:
        """Do nothing, because no message waits for room in the queue."""


class Replay:
    """A queue, its publishers and its consumers, in simulated time.

    Args:
        round_trip: length of a round trip in seconds.
        size: body bytes of every message.
        recorder: function that gets the simulated clock and returns an observer of the queue; ``None`` for no observer.
        begin: time of the simulated clock at the start, in seconds.
    """

    def __init__(
        self,
        marks: StopResume,
        capacities: Mapping[str, int],
        *,
        name: str = "replay",
        round_trip: float = 0.005,
        size: int = 100,
        recorder: Callable[[Callable[[], float]], FlowRecorder] | None = None,
        begin: float = 0.0,
    ) -> None:
        self.around = _Alone(begin)
        limits = QueueLimits(marks, Capacity(), None, Enforcement.BOTH)
        self.recorder = recorder(self.around.clock) if recorder is not None else None
        self.queue = Queue(name, limits, self.around, observer=self.recorder)
        self.senders = {sender: Sender(sender, capacity) for sender, capacity in capacities.items()}
        self.round_trip = round_trip
        self.round = 0
        self.sent = 0
        # Maximum number of round trips that a consumed message was in the queue.
        self.delay = 0
        self._message = StoredMessage(Address("", name), encode_header(size, None), b"\0" * size)
        self._credit = 0.0
        # Number of the round trip in which each message of the queue arrived.
        self._came: deque[int] = deque()
        # The sender of each message whose confirm arrives at the end of the current round trip.
        self._confirmed: list[Sender] = []

    def step(self, arrivals: Mapping[str, int], credit: float) -> None:
        """Simulate one round trip. `arrivals` has the number of new messages of each publisher.

        The consumers can take `credit` messages. If they take fewer, they can take at most 1 more in the next step.
        """
        queue = self.queue
        self.around.now += self.round_trip
        for name, count in arrivals.items():
            self.senders[name].to_send += count
        senders = list(self.senders.values())
        # The senders take turns to publish first, so that no sender has an advantage.
        first = self.round % len(senders)
        told = [(sender, sender.is_blocked) for sender in (*senders[first:], *senders[:first])]
        for sender, is_blocked in told:
            if is_blocked:
                continue
            for _ in range(min(sender.to_send, sender.capacity - sender.unconfirmed)):
                self._publish(sender)
        self._credit += credit
        while self._credit >= 1 and queue.depth:
            queue.take(no_ack=True)
            self._credit -= 1
            self.delay = max(self.delay, self.round - self._came.popleft())
        if not queue.depth:
            self._credit = min(self._credit, 1.0)
        for sender in self._confirmed:
            sender.unconfirmed -= 1
        self._confirmed.clear()
        for sender, is_blocked in told:
            if sender.to_send:
                if is_blocked:
                    sender.flowed += 1
                else:
                    sender.full += 1
        self.round += 1

    def _publish(self, sender: Sender) -> None:
        sender.to_send -= 1
        sender.unconfirmed += 1
        self.sent += 1
        completion = Completion(self.sent, sender.confirm)
        self.queue.enqueue(self._message, sender, completion)
        self._came.append(self.round)
        if completion.arm():
            self._confirmed.append(sender)

    def result(self) -> ReplayResult:
        marks = self.queue.limits.stop_resume
        senders = self.senders.values()
        peak = self.queue.contents.peak_depth
        return ReplayResult(
            stop=marks.stop_count,
            resume=marks.resume_count or 0,
            capacities={sender.name: sender.capacity for sender in senders},
            peak=peak,
            overshoot=max(0, peak - marks.stop_count) if marks.stop_count else 0,
            times_on=self.queue.flows.times_on,
            seconds_flowed=sum(sender.flowed for sender in senders) * self.round_trip,
            seconds_full=sum(sender.full for sender in senders) * self.round_trip,
            delay=self.delay * self.round_trip,
            sent=self.sent,
            unsent=sum(sender.to_send for sender in senders),
            seconds=self.round * self.round_trip,
        )


def replay(
    samples: Iterable[Sample],
    marks: StopResume,
    capacities: Mapping[str, int],
    *,
    drain_rate: float,
    round_trip: float = 0.005,
) -> ReplayResult:
    """Replay recorded messages through a queue.

    The messages of a sample arrive evenly over the length of the sample. If a sample was busy (`Sample.was_busy`), the
    consumers can take as many messages as they took in reality. Otherwise they can take `drain_rate` per second.

    Args:
        samples: recorded samples of one queue in order of time.
        drain_rate: number of messages per second that the consumers can take in samples that were not busy.
        round_trip: length of a round trip in seconds. A shorter sample still takes one round trip.
    """
    run = Replay(marks, capacities, round_trip=round_trip)
    for sample in samples:
        rounds = max(1, round(sample.seconds / round_trip))
        credit = (sample.left if sample.was_busy else drain_rate * sample.seconds) / rounds
        given = dict.fromkeys(sample.arrivals, 0)
        for at in range(1, rounds + 1):
            arrivals = {}
            for name, count in sample.arrivals.items():
                due = count * at // rounds
                if due > given[name]:
                    arrivals[name] = due - given[name]
                    given[name] = due
            run.step(arrivals, credit)
    return run.result()
