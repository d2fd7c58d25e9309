"""`Tenure` in simulated time, with a simulated session and producer."""

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
from qflow_client.sqlalchemy.sessions import RelayError, Row
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
        #: When the producer loses its channel, and whether it then opens and loses a channel each second.
        self.lost_at = math.inf
        self.loses_each = False
        #: The latest time when the producer is flowed.
        self.flows_at = math.inf
        #: When the producer reports its flow, and the reported event.
        self.tells_at = math.inf
        self.tell: Callable[[Any], None] = lambda _event: None
        #: When each wait began.
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
        self.waits.append(self.now)
        assert len(self.waits) < 10_000, "it does not rest"
        self.now += timeout
        if self.now >= self.tells_at:
            self.now, self.tells_at = max(self.tells_at, self.waits[-1]), math.inf
            self.tell(None)
        return False


class Flowed:
    """A producer that takes nothing, and reports that when it has been asked, or from a given time on."""

    capacity = available = 100

    def __init__(self, database: Database) -> None:
        self._database = database
        self._was_asked = False

    def on_flow(self, callback: Callable[[Any], None], **_: Any) -> Any:
        self._database.tell = callback
        return lambda: None

    @property
    def _protocol(self) -> Any:
        lost_at, now = self._database.lost_at, self._database.now
        opened_at = math.floor(now) if self._database.loses_each else 0.0
        return SimpleNamespace(channel=SimpleNamespace(number=1 if now < lost_at else None, opened_at=opened_at))

    @property
    def flow_state(self) -> Any:
        is_flowed = self._was_asked or self._database.now >= self._database.flows_at
        kinds = (HoldKind.CHANNEL_FLOW, HoldKind.CONNECTION_BLOCKED) if is_flowed else ()
        return SimpleNamespace(holds=[SimpleNamespace(kind=kind) for kind in kinds])

    def send_nowait(self, *_: Any, **__: Any) -> None:
        self._was_asked = True
        raise ProducerFlowed((), 0.0, None)


@pytest.fixture
def database(monkeypatch: pytest.MonkeyPatch) -> Database:
    made = Database()
    monkeypatch.setattr(tenure, "_monotonic", lambda: made.now)
    return made


def work(database: Database, seconds: float, lease: float = 1000.0) -> None:
    """Relay for a number of simulated seconds, with a producer that takes nothing."""
    metrics = RelayMetrics("relay", lambda: None)
    waker = Waker()
    end = database.now + seconds
    session: Any = database
    made = Tenure(
        session,
        RelayCounts(metrics),
        metrics,
        waker,
        lease=lease,
        poll=1.0,
        is_stopping=lambda: database.now > end,
    )
    producer: Any = Flowed(database)
    try:
        made.run(producer)
    finally:
        waker.close()


def test_E14_a_relay_with_a_flowed_producer_and_a_row_to_send_pauses_for_about_a_second_between_checks(
    database: Database,
) -> None:
    database.rows = [Row(1, 0, "", "q", HEADER, b"")]
    work(database, 10.0)
    # Once a second.
    assert len(database.waits) < 30
    assert database.reads == 1
    assert database.said == ["", "channel_flow, connection_blocked"]


def test_E14_a_relay_with_a_flowed_producer_pauses_while_another_relay_waits_for_its_partitions(
    database: Database,
) -> None:
    database.rows = [Row(1, 0, "", "q", HEADER, b"")]
    # Another relay joins, and waits for the unconfirmed row.
    database.shares = [EVERY, EVERY, set(range(0, PARTITIONS, 2))]
    work(database, 10.0)
    assert len(database.waits) < 30


def test_E14_a_relay_that_has_no_rows_stops_reading_the_database_when_its_producer_becomes_flowed(
    database: Database,
) -> None:
    database.flows_at = database.now + 5.0
    work(database, 10.0)
    assert len(database.waits) < 30
    # Once a second, until it is flowed.
    assert 4 <= database.reads <= 6


def test_E14_a_relay_with_a_flowed_producer_checks_often_for_a_short_time_after_a_flow_event(
    database: Database,
) -> None:
    database.rows = [Row(1, 0, "", "q", HEADER, b"")]
    told = database.tells_at = database.now + 5.5
    work(database, 10.0)
    soon = [wait for wait in database.waits if told <= wait < told + 0.1]
    # The event comes before the producer takes more.
    assert len(soon) >= 4
    assert len(database.waits) < 50


def test_E14_a_relay_without_a_channel_for_half_of_the_lease_gives_up_its_partitions(database: Database) -> None:
    began = database.now
    database.lost_at = began + 20.0
    with pytest.raises(RelayError, match="could not be reached for half of the lease"):
        work(database, 100.0, lease=10.0)
    assert 25.0 <= database.now - began < 27.0


def test_E14_a_relay_keeps_its_partitions_while_its_producer_opens_channels_and_loses_them(database: Database) -> None:
    database.lost_at, database.loses_each = database.now, True
    work(database, 100.0, lease=10.0)


def test_E14_a_relay_that_was_suspended_counts_the_time_without_a_channel_only_from_its_next_look(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    due = database.due
    suspensions = iter([0.0, 0.0, 6.0])

    def suspended() -> set[int]:
        database.now += next(suspensions, 0.0)
        return due()

    monkeypatch.setattr(database, "due", suspended)
    database.lost_at = database.now + 7.0
    with pytest.raises(RelayError, match="could not be reached for half of the lease"):
        work(database, 100.0, lease=10.0)
    assert 5.0 < database.now - database.lost_at < 10.0
