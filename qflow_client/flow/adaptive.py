"""A window that finds its own size: the smallest that keeps throughput at its maximum.

All that it goes by is how many elements leave, when, and whether somebody was refused meanwhile. Time is cut into
*epochs*, each with one capacity. An epoch lasts for at least one trip of an element through the window, and yields a
rate and a latency. The elements that are followed for that are few; nothing is done for the others.

Four rules move the window:

1. *Is the last part of it worth having?* Every other epoch does without the last 30 %. If that costs no throughput,
   nobody needs it, and the window shrinks; if it does, the window grows. While it is far too small, it doubles.
2. *Is there a queue?* The lowest latency of the recent past is that of the way itself. Where even the fastest trip of
   an epoch takes longer than that by a quarter and 10 ms, there is a standing queue, or a broker that commits in groups
   (what just misses a commit waits for a whole one more). There the last part has to be worth more to be kept, and the
   window only grows if throughput follows in full. Where a trip takes more than twice as long, it shrinks, whatever it
   is worth: among others who wait in the same queue, more is always worth something.
3. *Are answers held back?* When they come at last, after many times the latency, the window is halved before anything
   else enters.
4. *Was the window the limit?* An epoch in which the application was says nothing about the window, and changes nothing.
"""

from __future__ import annotations

from enum import Enum, auto
from math import inf, log

from qflow_client.flow.limiters import WindowLimiter, check_at_least_1

__all__ = ["AdaptiveWindow"]

# Elements: the window to begin with, and the least there is.
_INITIAL = 32
_FLOOR = 8
# The part of the window that a trial has.
_TRIAL = 0.7
# The throughput that a part of the window must be worth, as d(log rate) / d(log capacity): 1 where the window is all
# that limits it, 0 where it does not matter.
_WORTH_HAVING = 0.03
_WORTH_DOUBLING = 0.5
# The same where there may be a queue, for a part to be kept and for one to be added.
_WORTH_KEEPING = 0.2
_WORTH_ADDING = 0.9
# What a trial changes.
_GROW = 1.25
_SHRINK = 1.1
# Doublings in a row that are worth too little and still say nothing: a broker that commits in groups takes steps.
_FLAT = 2
# What counts as the same.
_EQUAL = 1.05
# Epochs without a trial where the window may not grow anyway.
_REST = 8
# What a trip may take longer than the way without a queue: this part of the way, and these seconds, for which a broker
# on a busy machine may lose its turn …
_JITTER = 0.25
_QUEUE = 0.01
# … and with group commits: this part of the way, at most these seconds, and the seconds above.
_COMMIT = 1.2
_COMMIT_AT_MOST = 0.05
# Seconds after which the way has to be seen again (as in BBR).
_WAY_KEEPS = 10.0
# Seconds that an epoch lasts at least, so that it says something.
_LEAST = 0.05
# Seconds for which nobody takes the room there is, and after which the application is what limits throughput.
_IDLE = 0.05


class _Epoch(Enum):
    """What is tried."""

    #: The whole window, twice that of the epoch before.
    GROWTH = auto()
    #: The whole window.
    FULL = auto()
    #: Most of the window, to see what the rest is worth.
    TRIAL = auto()
    #: The floor, to see the way without a queue.
    PROBE = auto()


_SHARE = {_Epoch.GROWTH: 1.0, _Epoch.FULL: 1.0, _Epoch.TRIAL: _TRIAL, _Epoch.PROBE: 0.0}


class AdaptiveWindow(WindowLimiter):
    """A window between a floor of 8 elements and a maximum, which follows what throughput needs.

    It starts small and doubles as long as throughput follows. From then on it does without 30 % of itself now and
    again: if that costs next to nothing it shrinks by a tenth, otherwise it grows by a quarter, or stays as it is where
    latency tells of a queue. It also shrinks where elements take more than about twice as long as without a queue, and
    is halved when they come back after a long silence. Time in which nobody waits for room changes nothing.

    It is a `WindowLimiter` that changes its own `capacity`. It has to be told of elements that leave *before* they do::

        window.observe(count, now)
        controller.release(size, count)

    What is set as its `capacity` from outside holds until the next epoch.

    Args:
        maximum: the most elements there may ever be inside, at least 1.
        kind: of the hold that a full window means.

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
        #: The most that `capacity` may become.
        self.maximum = maximum
        # The least capacity, and the least window, of which a trial has that capacity.
        self._floor = min(_FLOOR, maximum)
        self._least = min(_FLOOR / _TRIAL, maximum)
        #: Elements per second, and seconds that one was inside, in the last epoch; 0 before the first.
        self.rate = 0.0
        self.latency = 0.0
        #: Seconds that one is inside when there is no queue, as far as that was seen; infinite before the first epoch.
        self.way = inf
        # When that was seen last.
        self._way_at = -inf
        # What the epochs' capacities are parts of.
        self._window = float(self.capacity)

        # Elements that ever left, and those that had at the beginning of the present instant.
        self._settled = 0
        self._before = 0
        # When the last elements left: one reading of the socket brings many answers at the same time.
        self._instant = -inf
        # When somebody was first refused since; None if nobody was.
        self._refused_at: float | None = None

        self._epoch = _Epoch.GROWTH
        # Whether the elements that leave now are such as entered in this epoch.
        self._measuring = False
        # When that began, and how many had left then.
        self._since = 0.0
        self._from = 0
        # When the element that is followed entered, how many will have left when it does, the time by which that should
        # be, and the shortest that one took in this epoch.
        self._followed_at = 0.0
        self._due = 0
        self._fastest = inf
        self._patience = inf
        # Whether anybody was refused in this epoch, since when there has been room, and whether there was for too long.
        self._limited = False
        self._room_since = inf
        self._idle = False

        # While the window doubles, capacity and rate of each step; None while it does not.
        self._tried: list[tuple[int, float]] | None = []
        # The last of these steps that were worth too little.
        self._flat = 0
        # Capacity and rate of the trial before a full epoch.
        self._trial: tuple[int, float] | None = None
        # Whether the last pair said that the window is too small.
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
        # Written out, because every send comes here.
        if self.used < self._capacity:
            self.used += 1
            return None
        return self.refusal(size, now)

    def observe(self, count: int, now: float) -> None:
        """Take note that elements are about to leave, and change the capacity if that ends an epoch.

        Args:
            count: how many, at least 1.
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
        """Account for the time since elements last left."""
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
        """The latency beyond which there is a queue."""
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
        """Next to nothing has left for much longer than that should take."""
        if self._was_the_limit:
            self._window /= 2
            self._tried = None
        self._begin_again(now)

    def _begin_again(self, now: float) -> None:
        """Compare nothing that comes with what was before, and leave the window as it is until there is something."""
        self._trial = None
        self._paid = False
        # Where nothing is measured nothing gets old.
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
        # What is inside shows the capacity that it entered under.
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
        """Follow the element that enters next: it leaves after all that are inside, in whatever order those do."""
        self._followed_at = now
        self._due = self._settled + self.used + 1

    def _judge(self, rate: float, latency: float, now: float) -> None:
        """Decide what an epoch says, and begin the next one."""
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
        """Decide what the part of the window is worth that the trial did without."""
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
    """The throughput that more capacity brought: 1 if as much more, 0 if no more, or if there was no more capacity.

    Args:
        less: a capacity and the rate with it.
        more: a larger capacity and the rate with that.
    """
    return log(more[1] / less[1]) / log(more[0] / less[0]) if more[0] > less[0] else 0.0
