"""A window that finds its best size, which is the smallest size with maximum throughput.

The only inputs are the number of elements that leave, the time, and whether an element was refused since elements last
left. Time is divided into *epochs*. The capacity does not change in an epoch. If the capacity is new, the *measurement*
begins after the earlier elements have left. It lasts at least for one *trip*: the time from the entrance of an element
until it leaves. Its result is a rate and a latency. The latency is the shortest trip of a few timed elements.

Four rules change the window:

1. *Are the last 30 % of the window useful?* About every second epoch is a *trial* with only 70 % of the window. If this
    does not reduce throughput, the window shrinks. Otherwise the window grows. While it is far too small, it doubles.
2. *Is there a queue?* The lowest latency of the recent past is taken as the latency without a queue. If the
    latency of an epoch is longer by more than 25 % plus 10 ms, either elements always wait in a queue, or the broker
    commits in groups and elements wait for the next commit. In both cases the window keeps its last 30 % only if they
    add more throughput than rule 1 requires. It grows only if throughput grows in proportion to capacity.
    If the latency exceeds `_bound` (the longest latency without a queue), the window stops doubling, or shrinks.
    Rule 1 alone would not shrink it: if a queue has several producers, a larger window gets more throughput.
3. *Are answers delayed?* A measurement may take four times `_bound` plus 0.1 s. If it takes longer, the window is
    halved when the next elements leave, before further elements enter.
4. *Was the window the limit?* If the application was too slow to fill the window, the epoch changes nothing.
"""

from __future__ import annotations

from enum import Enum, auto
from math import inf, log

from qflow_client.flow.limiters import WindowLimiter, check_at_least_1

__all__ = ["AdaptiveWindow"]

# The initial window in elements.
_INITIAL = 32
# The smallest capacity in elements.
_FLOOR = 8
# A trial uses only this part of the window.
_TRIAL = 0.7
# The result of a trial, d(log rate) / d(log capacity), is 1 if only the window limits throughput, and 0 if it has no
# effect. Up to `_WORTH_HAVING` the window shrinks. Above `_WORTH_DOUBLING` it may double. Between them it grows.
_WORTH_HAVING = 0.03
_WORTH_DOUBLING = 0.5
# If elements wait in a queue, the window shrinks up to `_WORTH_KEEPING`, and grows only above `_WORTH_ADDING`.
_WORTH_KEEPING = 0.2
_WORTH_ADDING = 0.9
# After a trial without doubling, the window grows at most by the factor `_GROW`, or shrinks by the factor `_SHRINK`.
_GROW = 1.25
_SHRINK = 1.1
# Doubling ends after this number of useless doublings in a row. With group commits, one useless doubling may be chance.
_MAX_FLAT_STEPS = 2
# Two values count as equal if their ratio is at most this number.
_EQUAL_RATIO = 1.05
# If a trial was useful but the window could not grow, this number of full epochs comes before the next trial.
_EPOCHS_WITHOUT_TRIAL = 8
# A latency above ``way * (1 + _JITTER) + _QUEUE`` seconds shows a queue (see `AdaptiveWindow.way`).
_JITTER = 0.25
_QUEUE = 0.01
# With group commits, a trip may last ``way + min(way * _COMMIT, _COMMIT_AT_MOST) + _QUEUE`` seconds.
_COMMIT = 1.2
_COMMIT_AT_MOST = 0.05
# After this number of seconds the latency without a queue is measured again, as in BBR congestion control.
_WAY_KEEPS = 10.0
# The shortest epoch that gives a useful result, in seconds.
_MIN_EPOCH = 0.05
# If the window has had room for more than this number of seconds, the application is the limit.
_IDLE = 0.05


class _Epoch(Enum):
    """The kind of an epoch, which defines its capacity."""

    #: The whole window, which doubles after this epoch if throughput still grows.
    GROWTH = auto()
    #: The whole window.
    FULL = auto()
    #: Only 70 % of the window, to measure how much throughput the other 30 % add.
    TRIAL = auto()
    #: The smallest window, to measure the latency without a queue.
    PROBE = auto()


_SHARE = {_Epoch.GROWTH: 1.0, _Epoch.FULL: 1.0, _Epoch.TRIAL: _TRIAL, _Epoch.PROBE: 0.0}


class AdaptiveWindow(WindowLimiter):
    """A window that sets its own `capacity`: from 8 elements to a maximum, and as large as throughput needs.

    The window starts small and doubles while throughput grows. Later the window shrinks if a smaller window costs
    almost no throughput. It also shrinks if the latency shows a queue, or after a long time without answers. While no
    element waits for room, the size does not change.

    When elements leave, call `observe` *before* you release them::

        window.observe(count, now)
        controller.release(size, count)

    If you set `capacity`, the value stays until the next epoch.

    Args:
        maximum: upper limit of the window in elements, at least 1.
        kind: kind of the hold while the window is full.

    Raises:
        ValueError: the maximum is below 1.
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
        # The smallest capacity.
        self._floor = min(_FLOOR, maximum)
        # The smallest window. A trial with this window has the smallest capacity.
        self._least = min(_FLOOR / _TRIAL, maximum)
        #: Elements per second in the last epoch; 0 before the end of the first epoch.
        self.rate = 0.0
        #: The shortest trip of the last epoch in seconds; 0 before the end of the first epoch.
        self.latency = 0.0
        #: The lowest recent latency in seconds, taken as the latency without a queue; infinite in the first epoch.
        self.way = inf
        # When `way` was last measured, or when `_begin_again` was last called.
        self._way_at = -inf
        # The size of the window. The capacity of each epoch is a part of this size.
        self._window = float(self.capacity)

        # How many elements have left so far.
        self._settled = 0
        # How many elements had left before the time `_instant`.
        self._before = 0
        # When elements left most recently. Many elements leave at the same time, because one read has many answers.
        self._instant = -inf
        # When an element was first refused after the time `_instant`; ``None`` if no element was refused since then.
        self._refused_at: float | None = None

        self._epoch = _Epoch.GROWTH
        # Whether the elements that leave now entered in this epoch.
        self._measuring = False
        # When the measurement began.
        self._since = 0.0
        # How many elements had left before the measurement began.
        self._from = 0
        # When the timed element entered.
        self._followed_at = 0.0
        # How many elements will have left when the timed element leaves.
        self._due = 0
        # The shortest trip of this epoch in seconds.
        self._fastest = inf
        # If the measurement has not ended at this time, answers are delayed (rule 3).
        self._patience = inf
        # Whether an element was refused in this epoch.
        self._limited = False
        # When the window most recently got room.
        self._room_since = inf
        # Whether the window had room for more than `_IDLE` seconds at a time in this epoch.
        self._idle = False

        # Capacity and rate of each epoch while the window doubles; ``None`` otherwise.
        self._tried: list[tuple[int, float]] | None = []
        # How many of the latest doublings in a row added too little throughput.
        self._flat = 0
        # Capacity and rate of the trial before the present full epoch; ``None`` without such a trial.
        self._trial: tuple[int, float] | None = None
        # Whether the last trial, and the full epoch after it, showed that the window is too small.
        self._paid = False
        # How many full epochs come before the next trial.
        self._rest = 0

    def refusal(self, size: int, now: float) -> str | None:
        if self.used < self._capacity:
            return None
        if self._refused_at is None:
            self._refused_at = now
        return self.kind

    def try_add(self, size: int, now: float) -> str | None:
        # `refusal` and `add` are inlined for speed, as in `WindowLimiter`.
        if self.used < self._capacity:
            self.used += 1
            return None
        return self.refusal(size, now)

    def observe(self, count: int, now: float) -> None:
        """Record that elements are about to leave. If this ends an epoch, change the capacity.

        Args:
            count: the number of elements, at least 1.
        """
        if now > self._instant:
            self._look_back(now)
        if now > self._patience:
            self._stall(now)
        elif self._settled + count >= self._due and now > self._followed_at:
            self._end_round(now)
        self._settled += count

    def _look_back(self, now: float) -> None:
        """Record whether an element was refused since elements last left, and whether the window had room for long."""
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
        """The longest latency that group commits and a busy broker can cause without a queue."""
        return self.way + min(self.way * _COMMIT, _COMMIT_AT_MOST) + _QUEUE

    def _end_round(self, now: float) -> None:
        took = now - self._since
        if not self._was_the_limit:
            self._begin_again(now)
        elif not self._measuring:
            self._begin(now, measuring=True)
        else:
            self._fastest = min(self._fastest, now - self._followed_at)
            if took < _MIN_EPOCH:
                self._follow(now)
            else:
                self._judge((self._before - self._from) / took, self._fastest, now)

    def _stall(self, now: float) -> None:
        """Handle a measurement that did not end in time. Halve the window if it was the limit of throughput."""
        if self._was_the_limit:
            self._window /= 2
            self._tried = None
        self._begin_again(now)

    def _begin_again(self, now: float) -> None:
        """Forget the measurements. The window keeps its size until there are new measurements."""
        self._trial = None
        self._paid = False
        # This epoch has no result. So begin the wait of `_WAY_KEEPS` seconds again, after which `way` is measured.
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
        # After a change of the capacity, wait until the elements that entered with the old capacity have left.
        self._begin(now, measuring=self.capacity == before)

    def _begin(self, now: float, *, measuring: bool) -> None:
        self._measuring = measuring
        self._since = now
        self._from = self._before
        self._fastest = inf
        self._limited = False
        self._idle = False
        self._patience = inf if self._window <= self._least else now + 4 * self._bound + 2 * _MIN_EPOCH
        self._follow(now)

    def _follow(self, now: float) -> None:
        """Measure the trip of the next element. This element leaves after all elements that are inside now."""
        self._followed_at = now
        self._due = self._settled + self.used + 1

    def _judge(self, rate: float, latency: float, now: float) -> None:
        self.rate = rate
        self.latency = latency
        epoch = self._epoch
        if epoch is _Epoch.PROBE:
            self.way, self._way_at = latency, now
        elif latency <= self.way * _EQUAL_RATIO:
            self.way, self._way_at = min(self.way, latency), now
        late = latency > self._bound * _EQUAL_RATIO
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
        if late or self._flat == _MAX_FLAT_STEPS or self.capacity == self.maximum:
            enough = max(rate for _, rate in tried) / _EQUAL_RATIO
            self._window = min(capacity for capacity, rate in tried if rate >= enough)
            self._tried = None
            self._flat = 0
            self._paid = False
        else:
            self._window *= 2

    def _judge_pair(self, rate: float, latency: float) -> None:
        """Compare a full epoch with the trial before it, and change the window."""
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
            self._rest = _EPOCHS_WITHOUT_TRIAL
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
            if room < _EQUAL_RATIO:
                self._rest = _EPOCHS_WITHOUT_TRIAL


def _worth(less: tuple[int, float], more: tuple[int, float]) -> float:
    """Return how much throughput grew with capacity: 1 if in proportion, 0 if not at all.

    Each argument is a capacity and its rate. `more` has the larger capacity.
    """
    return log(more[1] / less[1]) / log(more[0] / less[0]) if more[0] > less[0] else 0.0
