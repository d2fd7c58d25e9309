"""The faults of a soak test and their times, all random with a seed.

Two threads create faults, each with its own random generator. One thread uses the proxies for faults of connections,
and the other thread acts on the broker. So connections also fail while the broker has an alarm or restarts.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from random import Random

from benchmarks.soak.brokers import SoakBroker
from benchmarks.soak.history import History
from qflow_client.testing.proxy import Direction, FaultProxy, ProxiedConnection

__all__ = ["Faults"]

# Average seconds between two faults of connections.
_BETWEEN = 1.0
# Minimum and maximum seconds between two faults of the broker.
_BETWEEN_BROKER = (4.0, 10.0)
# Maximum bytes in one direction after which a connection is cut, often in the middle of a frame.
_FEW_BYTES = 2000


class Faults:
    """Creates faults until `stop` is called, which ends all faults.

    Args:
        proxies: proxies between the broker and its clients, one for each node.
    """

    def __init__(self, broker: SoakBroker, proxies: Sequence[FaultProxy], seed: int, history: History) -> None:
        self._broker = broker
        self._history = history
        self._proxies = proxies
        self._chance = Random(f"{seed} connections")
        self._broker_chance = Random(f"{seed} broker")
        self._stop = threading.Event()
        # Functions that end lasting faults, as a heap in the order of due times.
        self._undo: list[tuple[float, int, Callable[[], object]]] = []
        self._undone = 0
        self._threads = [
            threading.Thread(target=self._guarded, args=(self._harm_connections,), name="connection faults"),
            threading.Thread(target=self._guarded, args=(self._harm_broker,), name="broker faults"),
        ]
        #: Number of faults of each kind.
        self.counts: Counter[str] = Counter()
        #: Number of connections that were closed or made unusable.
        self.connection_faults = 0
        #: Number of kills of the broker.
        self.kills = 0
        #: The current action on the broker; empty if there is none.
        self.now = ""
        #: Unexpected errors.
        self.troubles: list[str] = []

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        for _, _, undo in self._undo:
            self._undo_now(undo)
        self._undo.clear()
        for proxy in self._proxies:
            proxy.heal()

    def _guarded(self, run: Callable[[], None]) -> None:
        try:
            run()
        except Exception as error:
            self.troubles.append(f"{threading.current_thread().name}: {type(error).__name__}: {error}")

    def _harm_connections(self) -> None:
        names = ("cut", "reset", "cut_inside", "black_hole", "stall", "slow", "chop", "refuse", "flow")
        weights = (4, 4, 4, 2, 3, 1, 1, 1, 4)
        next_at = time.monotonic()
        while not self._stop.is_set():
            now = time.monotonic()
            while self._undo and self._undo[0][0] <= now:
                self._undo_now(heapq.heappop(self._undo)[2])
            if now >= next_at:
                next_at = now + self._chance.expovariate(1 / _BETWEEN)
                name = self._chance.choices(names, weights)[0]
                proxy = self._chance.choice(self._proxies)
                there = proxy.connections
                if there:
                    # The connection may already be closed.
                    with contextlib.suppress(LookupError, StopIteration), self._harming(name.replace("_", " ")):
                        getattr(self, f"_{name}")(proxy, self._chance.choice(there))
            until = min(next_at, self._undo[0][0]) if self._undo else next_at
            self._stop.wait(max(0.0, until - time.monotonic()))

    @contextlib.contextmanager
    def _harming(self, name: str) -> Iterator[None]:
        """Record and count a fault. Some faults, such as a stall, last longer than the ``with`` block."""
        with self._history.calling("fault", name=name):
            yield
        self.counts[name] += 1

    def _later(self, seconds: float, undo: Callable[[], object]) -> None:
        self._undone += 1
        heapq.heappush(self._undo, (time.monotonic() + seconds, self._undone, undo))

    def _undo_now(self, undo: Callable[[], object]) -> None:
        # The connection or the broker may already be gone.
        with contextlib.suppress(LookupError, StopIteration):
            undo()

    def _one_or_all(self, proxy: FaultProxy, connection: ProxiedConnection) -> int | None:
        """Return the number of the connection, or sometimes None for all connections. Count each connection."""
        if self._chance.random() < 0.85:
            self.connection_faults += 1
            return connection.number
        self.connection_faults += len(proxy.connections)
        return None

    def _direction(self) -> Direction:
        return self._chance.choice(tuple(Direction))

    def _cut(self, proxy: FaultProxy, connection: ProxiedConnection) -> None:
        proxy.cut(self._one_or_all(proxy, connection))

    def _reset(self, proxy: FaultProxy, connection: ProxiedConnection) -> None:
        proxy.reset(self._one_or_all(proxy, connection))

    def _cut_inside(self, proxy: FaultProxy, connection: ProxiedConnection) -> None:
        size = self._chance.randint(1, _FEW_BYTES)
        proxy.cut_after(size=size, direction=self._direction(), connection=connection.number)
        self.connection_faults += 1

    def _black_hole(self, proxy: FaultProxy, connection: ProxiedConnection) -> None:
        direction = self._chance.choice((*Direction, None))
        # A heartbeat detects a black hole.
        proxy.black_hole(direction, connection.number)
        self.connection_faults += 1

    def _stall(self, proxy: FaultProxy, connection: ProxiedConnection) -> None:
        direction = self._chance.choice((*Direction, None))
        number = connection.number
        proxy.stall(direction, number)
        # A heartbeat detects longer stalls. Bytes on their way arrive after a stall.
        self._later(self._chance.choice((0.1, 0.5, 2.0, 20.0)), lambda: proxy.heal(number))

    def _slow(self, proxy: FaultProxy, connection: ProxiedConnection) -> None:
        number = connection.number
        if self._chance.random() < 0.5:
            proxy.delay(0.2, jitter=0.3, connection=number)
        else:
            proxy.limit(20_000, connection=number)
        self._later(3.0, lambda: proxy.heal(number))

    def _chop(self, proxy: FaultProxy, connection: ProxiedConnection) -> None:
        number = connection.number
        proxy.split(1, 50, connection=number)
        self._later(1.0, lambda: proxy.heal(number))

    def _refuse(self, proxy: FaultProxy, _connection: ProxiedConnection) -> None:
        proxy.refuse()
        self.connection_faults += len(proxy.connections)
        proxy.reset()
        self._later(self._chance.uniform(0.2, 3.0), proxy.heal)

    def _flow(self, proxy: FaultProxy, connection: ProxiedConnection) -> None:
        number = connection.number
        self._broker.flow(proxy, False, number)
        self._later(self._chance.uniform(0.1, 4.0), lambda: self._broker.flow(proxy, True, number))

    def _harm_broker(self) -> None:
        chance = self._broker_chance
        actions = list(self._broker.actions)
        chance.shuffle(actions)
        others = itertools.cycle(actions)
        turn = 0
        while not self._stop.wait(chance.uniform(*_BETWEEN_BROKER)):
            turn += 1
            self.now = "killed" if turn % 2 else next(others)
            with self._harming(f"broker {self.now}"):
                if turn % 2:
                    self.kills += 1
                    self._broker.kill()
                else:
                    self._broker.actions[self.now](chance, self._stop.wait)
            self.now = ""
