"""What other marks and capacities would have done: recorded arrivals through the broker's own queue, sans-I/O.

Time goes in round trips. In each, a publisher that is not held sends what it has and what its capacity has room for;
only then it learns that it is to stop: so the queue goes as far past its stop threshold as C6 allows. Then the consumer
takes what it can, and confirms that nobody keeps back arrive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
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
    """What happened to a queue between two looks at it.

    Attributes:
        seconds: how long that was.
        arrivals: messages by publisher.
        left: messages that left.
        was_busy: whether there was always something to take, so that `left` is what the consumers could.
    """

    seconds: float
    arrivals: Mapping[str, int]
    left: int
    was_busy: bool


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What would have been.

    Attributes:
        stop: the stop threshold, in messages.
        resume: the resume threshold.
        capacities: of the publishers.
        peak: the most messages in the queue.
        overshoot: how many of them beyond the stop threshold.
        times_on: how often the queue turned ON.
        seconds_flowed: seconds that publishers with something to send were held by the queue, all together.
        seconds_full: seconds that they were held by their capacity alone.
        delay: seconds that the slowest message was in the queue.
        sent: messages that were published.
        unsent: messages that still waited at the end.
        seconds: how long it was.
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
        """Seconds that publishers with something to send were held."""
        return self.seconds_flowed + self.seconds_full


class Sender(FlowSource):
    """A publisher with a capacity.

    Args:
        name: of the publisher.
        capacity: the most messages that it may have unconfirmed.
    """

    __slots__ = ("capacity", "flowed", "full", "to_send", "unconfirmed")

    def __init__(self, name: str, capacity: int) -> None:
        super().__init__(name)
        self.capacity = capacity
        #: Messages that it has and has not published.
        self.to_send = 0
        #: Messages that it has published and that are not confirmed.
        self.unconfirmed = 0
        #: Round trips for which it was held by the queue, and by its capacity alone.
        self.flowed = self.full = 0

    def confirm(self, _: int) -> None:
        """One of its messages is confirmed."""
        self.unconfirmed -= 1


@dataclass(slots=True)
class _Alone:
    """What is around a queue that has no virtual host."""

    now: float = 0.0
    alarms: list[float] = field(default_factory=list)
    #: Nothing of it is read ahead.
    window: int = 0

    def clock(self) -> float:
        return self.now

    def wake_at(self, queue: Queue, at: float) -> None:
        """Nothing of it has deadlines."""

    def died(self, queue: Queue, message: StoredMessage, reason: object) -> None:
        """Nothing of it has a dead-letter exchange."""

    def unused(self, queue: Queue) -> None:
        """It does not expire."""

    def admit_waiting(self, queue: Queue, now: float) -> None:
        """Nothing waits in front of it."""


class Replay:
    """A queue, its publishers and its consumers, in simulated time.

    Args:
        marks: of the queue.
        capacities: of the publishers, by name.
        name: of the queue.
        round_trip: seconds.
        size: body bytes of every message.
        recorder: makes, from a clock, whom to tell of everything; ``None`` for nobody.
        begin: what time it is, in seconds.
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
        #: Told of everything; ``None`` for nobody.
        self.recorder = recorder(self.around.clock) if recorder is not None else None
        self.queue = Queue(name, limits, self.around, observer=self.recorder)
        self.senders = {sender: Sender(sender, capacity) for sender, capacity in capacities.items()}
        self.round_trip = round_trip
        self.round = 0
        self.sent = 0
        # The slowest message, in round trips.
        self.delay = 0
        self._message = StoredMessage(Address("", name), encode_header(size, None), b"\0" * size)
        self._credit = 0.0
        # In which round those in the queue came, and those whose confirms arrive at the end of this one.
        self._came: deque[int] = deque()
        self._confirmed: list[Sender] = []

    def step(self, arrivals: Mapping[str, int], credit: float) -> None:
        """One round trip.

        Args:
            arrivals: what publishers have to send, more than before.
            credit: messages that consumers can take.
        """
        queue = self.queue
        self.around.now += self.round_trip
        for name, count in arrivals.items():
            self.senders[name].to_send += count
        senders = list(self.senders.values())
        # Nobody is always the first.
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
        """What has been."""
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
    """Lead recorded arrivals through a queue.

    What arrived in a sample arrives evenly over its time. The consumers take what they took where they always had
    something to take, and `drain_rate` where not.

    Args:
        samples: in order.
        marks: of the queue.
        capacities: of all publishers that the samples name.
        drain_rate: messages per second that the consumers can take.
        round_trip: seconds; of a sample that is shorter, all of it.
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
