"""A window that finds its own size: the smallest size with maximum throughput.

Its only inputs are the number of elements that leave, the time when they leave, and whether an element was refused
meanwhile. Time is divided into *epochs*, each with one capacity. An epoch lasts for at least one trip of an element
through the window, and yields a rate and a latency. Only a few elements are timed for that; the others cost nothing.

Four rules change the window:

1. *Is the last part of the window useful?* Every other epoch runs without the last 30 %. If throughput stays the same,
   the window shrinks. If throughput falls, the window grows. While the window is far too small, it doubles.
2. *Is there a queue?* The lowest latency of the recent past is the latency without a queue. If even the fastest trip of
   an epoch takes more than a quarter and 10 ms longer than that, there are two possible causes. Either there is a
   standing queue, or the broker commits in groups (an element that just misses a commit waits for the next one). In
   both cases the last part has to bring more throughput to be kept, and the window grows only if throughput grows in
   proportion. If a trip takes more than twice as long as without a queue, the window shrinks in any case. The test of
   rule 1 is not useful then: if others wait in the same queue, a larger window always brings some throughput.
3. *Are answers delayed?* If answers come only after many times the latency, the window is halved before another element
   enters.
4. *Was the window the limit?* If the application was the limit of an epoch, the epoch changes nothing.
"""

from __future__ import annotations

from enum import Enum, auto
from math import inf, log

from qflow_client.flow.limiters import WindowLimiter, check_at_least_1

__all__ = ["AdaptiveWindow"]

# The initial window, and the lower limit of the window, in elements.
_INITIAL = 32
_FLOOR = 8
# The part of the window that is used in a trial.
_TRIAL = 0.7
# The throughput that a part of the window must bring, as d(log rate) / d(log capacity). This is 1 if only the window
# limits throughput, and 0 if the window does not matter.
_WORTH_HAVING = 0.03
_WORTH_DOUBLING = 0.5
# The same value if there may be a queue: for keeping a part, and for adding one.
_WORTH_KEEPING = 0.2
_WORTH_ADDING = 0.9
# The factors by which a trial changes the window.
_GROW = 1.25
_SHRINK = 1.1
# How many doublings in a row may bring too little before doubling ends. A broker that commits in groups takes steps.
_FLAT = 2
# A ratio up to this one is treated as equal.
_EQUAL = 1.05
# Epochs without a trial if the window may not grow anyway.
_REST = 8
# How much longer than without a queue a trip may take: this part of the latency without a queue, and these seconds,
# because a broker on a busy machine may get no CPU time for a while …
_JITTER = 0.25
_QUEUE = 0.01
# … and with group commits: this part of the latency without a queue, at most these seconds, and the seconds above.
_COMMIT = 1.2
_COMMIT_AT_MOST = 0.05
# Seconds after which the latency without a queue has to be measured again (as in BBR).
_WAY_KEEPS = 10.0
# The shortest epoch that gives a useful result, in seconds.
_LEAST = 0.05
# If there has been unused room for this many seconds, the application limits throughput.
_IDLE = 0.05


class _Epoch(Enum):
    """What an epoch tries."""

    #: The whole window, twice as large as in the epoch before.
    GROWTH = auto()
    #: The whole window.
    FULL = auto()
    #: The part of the window that is used to measure the value of the other part.
    TRIAL = auto()
    #: The smallest window, to measure the latency without a queue.
    PROBE = auto()


_SHARE = {_Epoch.GROWTH: 1.0, _Epoch.FULL: 1.0, _Epoch.TRIAL: _TRIAL, _Epoch.PROBE: 0.0}


class AdaptiveWindow(WindowLimiter):
    """A window between 8 elements and a maximum, which adapts to the size that throughput needs.

    It starts small and doubles while throughput grows with it. Then it sometimes runs without 30 % of its size. If that
    costs almost no throughput, it shrinks by a tenth. Otherwise it grows by a quarter, or stays as it is if the latency
    shows a queue. It also shrinks if elements take more than about twice as long as without a queue. It is halved when
    elements come back after a long silence. While no element waits for room, the size does not change.

    It is a `WindowLimiter` that changes its own `capacity`. Call `observe` for elements that leave *before* they are
    released::

        window.observe(count, now)
        controller.release(size, count)

    A `capacity` that is set from outside holds until the next epoch.

    Args:
        maximum: the most elements that may ever be inside, at least 1.
        kind: the kind of the hold for a full window.

    Raises:
        ValueError: a maximum below 1.
    """

    __slots__ = (
        "_before",
        "_due",
        "_epoch",
        "_fastest",
        "_flat",
        "_floor",
        "_followed_at",
        "_from",
        "_idle",
        "_instant",
        "_least",
        "_limited",
        "_measuring",
        "_paid",
        "_patience",
        "_refused_at",
        "_rest",
        "_room_since",
        "_settled",
        "_since",
        "_trial",
        "_tried",
        "_way_at",
        "_window",
        "latency",
        "maximum",
        "rate",
        "way",
    )

    def __init__(self, maximum: int, *, kind: str = "capacity") -> None:
        check_at_least_1("maximum", maximum)
        super().__init__(min(_INITIAL, maximum), kind=kind)
        #: The upper limit of `capacity`.
        self.maximum = maximum
        # The lowest capacity, and the lowest window for which a trial has that capacity.
        self._floor = min(_FLOOR, maximum)
        self._least = min(_FLOOR / _TRIAL, maximum)
        #: Elements per second, and seconds that an element was inside, in the last epoch; 0 before the first.
        self.rate = 0.0
        self.latency = 0.0
        #: The measured seconds that an element is inside without a queue; infinite before the first epoch.
        self.way = inf
        # When this latency was measured last.
        self._way_at = -inf
        # The capacity of each epoch is a part of this value.
        self._window = float(self.capacity)

        # Elements that ever left, and the value of this count at the beginning of the present instant.
        self._settled = 0
        self._before = 0
        # When the last elements left. One reading of the socket brings many answers at the same time.
        self._instant = -inf
        # When an element was first refused after that; ``None`` if none was.
        self._refused_at: float | None = None

        self._epoch = _Epoch.GROWTH
        # Whether the elements that leave now have entered in this epoch.
        self._measuring = False
        # When the measurement began, and how many elements had left then.
        self._since = 0.0
        self._from = 0
        # The timed element: when it entered, how many elements will have left when it leaves, and the time by which it
        # should leave. Also the shortest trip of this epoch.
        self._followed_at = 0.0
        self._due = 0
        self._fastest = inf
        self._patience = inf
        # Whether an element was refused in this epoch, since when there has been room, and whether there was room for
        # too long.
        self._limited = False
        self._room_since = inf
        self._idle = False

        # While the window doubles, capacity and rate of each step; ``None`` while it does not.
        self._tried: list[tuple[int, float]] | None = []
        # How many of the last of these steps brought too little.
        self._flat = 0
        # Capacity and rate of the trial before a full epoch.
        self._trial: tuple[int, float] | None = None
        # Whether the last pair of epochs showed that the window is too small.
        self._paid = False
        # Full epochs until the next trial.
        self._rest = 0

    def refusal(self, size: int, now: float) -> str | None:
        if self.used < self._capacity:
            return None
        if self._refused_at is None:
            self._refused_at = now
        return self.kind

    def try_add(self, size: int, now: float) -> str | None:
        # Inlined for speed, because every send calls this.
        if self.used < self._capacity:
            self.used += 1
            return None
        return self.refusal(size, now)

    def observe(self, count: int, now: float) -> None:
        """Record that elements are about to leave. Change the capacity if that ends an epoch.

        Args:
            count: the number of elements, at least 1.
            now: seconds.
        """
        if now > self._instant:
            self._look_back(now)
        if now > self._patience:
            self._stall(now)
        elif self._settled + count >= self._due and now > self._followed_at:
            self._end_round(now)
        self._settled += count

    def _look_back(self, now: float) -> None:
        """Account for the time since the last elements left."""
        if self._refused_at is not None:
            self._limited = True
            self._idle = self._idle or self._refused_at - self._room_since > _IDLE
            self._refused_at = None
            self._room_since = now
        self._instant = now
        self._before = self._settled

    @property
    def _was_the_limit(self) -> bool:
        return self._limited and not self._idle and self._instant - self._room_since <= _IDLE

    @property
    def _bound(self) -> float:
        """The latency above which there is a queue."""
        return self.way + min(self.way * _COMMIT, _COMMIT_AT_MOST) + _QUEUE

    def _end_round(self, now: float) -> None:
        took = now - self._since
        if not self._was_the_limit:
            self._begin_again(now)
        elif not self._measuring:
            self._begin(now, measuring=True)
        else:
            self._fastest = min(self._fastest, now - self._followed_at)
            if took < _LEAST:
                self._follow(now)
            else:
                self._judge((self._before - self._from) / took, self._fastest, now)

    def _stall(self, now: float) -> None:
        """Handle a stall: almost nothing has left for much longer than a trip should take."""
        if self._was_the_limit:
            self._window /= 2
            self._tried = None
        self._begin_again(now)

    def _begin_again(self, now: float) -> None:
        """Discard earlier measurements, and keep the window as it is until there are new ones."""
        self._trial = None
        self._paid = False
        # While nothing is measured, measurements do not expire.
        self._way_at = now
        if self._tried is None:
            self._start(_Epoch.FULL, now)
        else:
            self._tried = []
            self._start(_Epoch.GROWTH, now)

    def _start(self, epoch: _Epoch, now: float) -> None:
        self._window = min(max(self._window, self._least), self.maximum)
        before = self.capacity
        self.capacity = min(max(round(self._window * _SHARE[epoch]), self._floor), self.maximum)
        self._epoch = epoch
        # The elements inside entered under the old capacity, so they show its latency.
        self._begin(now, measuring=self.capacity == before)

    def _begin(self, now: float, *, measuring: bool) -> None:
        self._measuring = measuring
        self._since = now
        self._from = self._before
        self._fastest = inf
        self._limited = False
        self._idle = False
        self._patience = inf if self._window <= self._least else now + 4 * self._bound + 2 * _LEAST
        self._follow(now)

    def _follow(self, now: float) -> None:
        """Time the element that enters next. It leaves after all elements that are inside, in any order."""
        self._followed_at = now
        self._due = self._settled + self.used + 1

    def _judge(self, rate: float, latency: float, now: float) -> None:
        """Evaluate an epoch, and begin the next one."""
        self.rate = rate
        self.latency = latency
        epoch = self._epoch
        if epoch is _Epoch.PROBE:
            self.way, self._way_at = latency, now
        elif latency <= self.way * _EQUAL:
            self.way, self._way_at = min(self.way, latency), now
        late = latency > self._bound * _EQUAL
        if epoch is _Epoch.GROWTH:
            self._judge_growth(rate, late)
        elif late:
            self._trial = None
            self._paid = False
            self._window *= max(0.5, self._bound / latency)
        elif epoch is _Epoch.TRIAL:
            self._trial = self.capacity, rate
        elif epoch is _Epoch.FULL and self._trial is not None:
            self._judge_pair(rate, latency)
        self._start(self._next(now, late), now)

    def _next(self, now: float, late: bool) -> _Epoch:
        if self._tried is not None:
            return _Epoch.GROWTH
        if self._epoch in (_Epoch.TRIAL, _Epoch.PROBE):
            return _Epoch.FULL
        if now - self._way_at > _WAY_KEEPS or (late and self._window <= self._least):
            return _Epoch.PROBE
        if late:
            return _Epoch.FULL
        if self._rest:
            self._rest -= 1
            return _Epoch.FULL
        return _Epoch.TRIAL

    def _judge_growth(self, rate: float, late: bool) -> None:
        assert self._tried is not None
        tried = self._tried
        tried.append((self.capacity, rate))
        if len(tried) > 1 and _worth(tried[-2], tried[-1]) < _WORTH_DOUBLING:
            self._flat += 1
        else:
            self._flat = 0
        if late or self._flat == _FLAT or self.capacity == self.maximum:
            enough = max(rate for _, rate in tried) / _EQUAL
            self._window = min(capacity for capacity, rate in tried if rate >= enough)
            self._tried = None
            self._flat = 0
            self._paid = False
        else:
            self._window *= 2

    def _judge_pair(self, rate: float, latency: float) -> None:
        """Compute what the part of the window that the trial left out is worth."""
        assert self._trial is not None
        trial, self._trial = self._trial, None
        full = self.capacity, rate
        worth = _worth(trial, full)
        queues = latency > self.way * (1 + _JITTER) + _QUEUE
        if worth <= (_WORTH_KEEPING if queues else _WORTH_HAVING):
            self._window /= _SHRINK
            self._paid = False
        elif queues and worth <= _WORTH_ADDING:
            self._paid = False
            self._rest = _REST
        elif (
            worth > _WORTH_DOUBLING
            and self._paid
            and latency < self.way * (1 + _JITTER)
            and self.capacity < self.maximum
        ):
            self._tried = [trial, full]
            self._flat = 0
            self._window *= 2
        else:
            room = min(_GROW, self._bound / latency, self.maximum / self._window)
            self._window *= room
            self._paid = True
            if room < _EQUAL:
                self._rest = _REST


def _worth(less: tuple[int, float], more: tuple[int, float]) -> float:
    """Return how throughput grew with capacity: 1 if in proportion, 0 if not at all or if capacity did not grow.

    Args:
        less: a capacity and the rate with it.
        more: a larger capacity and the rate with that.
    """
    return log(more[1] / less[1]) / log(more[0] / less[0]) if more[0] > less[0] else 0.0
