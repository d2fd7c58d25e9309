"""`Tenure` in simulated time, with a session and a producer that do what a test says."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from qflow_client import Message, ProducerFlowed
from qflow_client.amqp.frames import content_header
from qflow_client.events import HoldKind
from qflow_client.sqlalchemy import tenure
from qflow_client.sqlalchemy.relay import RelayCounts
from qflow_client.sqlalchemy.sessions import Row
from qflow_client.sqlalchemy.tables import PARTITIONS
from qflow_client.sqlalchemy.tenure import Tenure, Waker
from qflow_client.telemetry import RelayMetrics

EVERY = set(range(PARTITIONS))
HEADER = content_header(Message(b""))


class Database:
    """A session; time passes only in `wait`."""

    is_notified = True
    is_full = False
    has_more = False

    def __init__(self) -> None:
        self.now = 1000.0
        self.shares = [EVERY]
        self.rows: list[Row] = []
        self.reads = 0
        #: When the producer is flowed at the latest.
        self.flows_at = math.inf
        self.waits: list[float] = []
        self.said: list[str] = []

    def join(self) -> None: ...
    def start_over(self) -> None: ...
    def ping(self) -> None: ...
    def delete(self, gone: Any) -> None: ...
    def give_up(self, doubts: Any) -> None: ...

    def due(self) -> set[int]:
        return self.shares[0] if len(self.shares) == 1 else self.shares.pop(0)

    def take(self, partitions: Iterable[int]) -> dict[int, int]:
        return dict.fromkeys(partitions, 0)

    def is_full_due(self) -> bool:
        return False

    def read(self, limit: int, gone: Any = ()) -> list[Row]:
        self.reads += 1
        rows, self.rows = self.rows[:limit], self.rows[limit:]
        return rows

    def say(self, holds: str) -> None:
        self.said.append(holds)

    def wait(self, wake: Any, timeout: float) -> bool:
        self.waits.append(timeout)
        assert len(self.waits) < 10_000, "it does not rest"
        self.now += timeout
        return False


class Flowed:
    """A producer that takes nothing, and says so once it has been asked, or from a moment on."""

    capacity = available = 100

    def __init__(self, is_flowed: Callable[[], bool]) -> None:
        self._is_flowed = is_flowed
        self._was_asked = False

    def on_flow(self, *_: Any, **__: Any) -> Any:
        return lambda: None

    @property
    def flow_state(self) -> Any:
        kinds = (HoldKind.CHANNEL_FLOW, HoldKind.CONNECTION_BLOCKED) if self._was_asked or self._is_flowed() else ()
        return SimpleNamespace(holds=[SimpleNamespace(kind=kind) for kind in kinds])

    def send_nowait(self, *_: Any, **__: Any) -> None:
        self._was_asked = True
        raise ProducerFlowed((), 0.0, None)


@pytest.fixture
def database(monkeypatch: pytest.MonkeyPatch) -> Database:
    made = Database()
    monkeypatch.setattr(tenure, "_monotonic", lambda: made.now)
    return made


def work(database: Database, seconds: float) -> None:
    """Relay for so many simulated seconds, with a producer that takes nothing."""
    metrics = RelayMetrics("relay", lambda: None)
    waker = Waker()
    end = database.now + seconds
    session: Any = database
    made = Tenure(
        session,
        RelayCounts(metrics),
        metrics,
        waker,
        lease=1000.0,
        poll=1.0,
        is_stopping=lambda: database.now > end,
    )
    producer: Any = Flowed(lambda: database.now >= database.flows_at)
    made.run(producer)
    waker.close()


def test_E14_a_flowed_relay_rests_while_a_row_that_is_permitted_waits(database: Database) -> None:
    database.rows = [Row(1, 0, "", "q", HEADER, b"")]
    work(database, 10.0)
    # Fifty times a second.
    assert len(database.waits) < 1000
    assert database.reads == 1
    assert database.said == ["", "channel_flow, connection_blocked"]


def test_E14_a_flowed_relay_rests_while_partitions_are_to_change(database: Database) -> None:
    database.rows = [Row(1, 0, "", "q", HEADER, b"")]
    # Another relay joins, and waits for the row that is on its way.
    database.shares = [EVERY, EVERY, set(range(0, PARTITIONS, 2))]
    work(database, 10.0)
    assert len(database.waits) < 1000


def test_E14_a_relay_that_is_flowed_after_it_has_read_everything_rests(database: Database) -> None:
    database.flows_at = database.now + 5.0
    work(database, 10.0)
    assert len(database.waits) < 1000
    # Once a second, until it is flowed.
    assert 4 <= database.reads <= 6
