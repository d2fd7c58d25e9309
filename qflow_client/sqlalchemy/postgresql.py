"""A relay's session with PostgreSQL. The session locks partitions, and reads and writes rows.

**Partitions.** All rows with the same ordering key are in one partition. Each relay has a shared advisory lock, which
makes the relay a member. A relay also has an exclusive lock on each partition on which it works. Members are ordered
by the pid of their server process. Partition ``p`` belongs to member ``p mod n`` of ``n`` members. A relay locks each
partition that belongs to it, as soon as no other relay has the lock. When a partition no longer belongs to a relay,
the relay unlocks it. If two relays see different members, a partition may have no relay for a moment, but never two.

The locks end with the session. If the relay is killed, the session ends immediately. If the relay is suspended or cut
off from the database, the session ends within the lease. The server measures how long a session is idle
(``idle_session_timeout``), so no clocks are compared.

**Reading.** A transaction assigns ids to its rows before it commits. So rows do not become visible in the order of
their ids. A reader that remembers only the last id would miss rows. Therefore a relay reads rows in *sweeps*. Each
sweep has a snapshot, and reads the new rows in pages, in the order of ids. A row is new if the snapshot of this sweep
shows it, and the previous snapshot does not. So the transaction of a new row (the column ``xid``) began after the
previous snapshot, or was in progress at that time. Both conditions select short ranges of an index. The result:

- Each row is new in exactly one sweep. A row whose transaction commits late is new in a later sweep.
- After a transaction has committed, its rows are read before any row that another transaction adds later. A snapshot
  that shows the later row also shows the earlier row, and a sweep reads rows in the order of ids. Transactions that
  overlap in time have no order that an application could observe.
- A transaction that stays open delays only its own rows. While the transaction is open, PostgreSQL cannot vacuum
  deleted rows. But a relay does not visit the deleted rows again, because each page begins after the last row of the
  previous page.

**Writing.** Before rows are published, a commit stores the id up to which rows may be published, and waits for the
disk. Rows up to this id are *permitted*. The stored id is `AHEAD` above the last row that was read. So at a low rate
most reads find only permitted rows, and do not wait for the disk. One statement reads rows and deletes confirmed rows.

The first sweep of a session is *full*, because there is no previous snapshot. The next full sweep is due a minute
later. A full sweep scans the table, and finds rows that other sweeps miss, such as rows from a backup.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

from sqlalchemy import Engine, text

from qflow_client.sqlalchemy.sessions import FULL_PERIOD, PAGE_BYTES, Aside, RelayError, Row, silence_of, wait_readable
from qflow_client.sqlalchemy.tables import PARTITIONS, Tables

__all__ = ["AHEAD", "PostgresqlSession"]

# Means "no transaction is in progress". The list is not empty, because psycopg cannot know the type of an empty list.
_NO_TRANSACTIONS = [-1]
# Greater than any transaction number.
_AFTER_ALL = 1 << 62
#: A commit permits the rows that were read, and this number of further ids. Rows with the further ids are published
#: without a wait for the disk. After a crash, up to this number of first copies are marked as second copies.
AHEAD = 1000

_monotonic = time.monotonic


class PostgresqlSession:
    """A session of a relay with PostgreSQL, on its own connection.

    Args:
        engine: an engine of SQLAlchemy with the driver psycopg.
        lease: if the relay is inactive for this number of seconds, another relay gets its partitions; see `silence_of`.

    Raises:
        RelayError: the server is not supported.
        sqlalchemy.exc.SQLAlchemyError: the database cannot be reached.
    """

    #: Whether ``NOTIFY``, which the application sends with a commit, ends `wait`.
    is_notified = True

    def __init__(self, engine: Engine, tables: Tables, lease: float) -> None:
        self._tables = tables
        quote = engine.dialect.identifier_preparer.format_table
        self._rows, self._failed, self._relay = quote(tables.rows), quote(tables.failed), quote(tables.relay)
        self._find_next = self._statement("%(last)s")
        # Find the first new row by the index on xid. With ORDER BY id, the planner might visit all ids, including the
        # ids of deleted rows.
        self._find_first = self._statement(
            f"(SELECT min(id) - 1 FROM (SELECT id FROM {self._rows}"
            " WHERE xid >= %(before_xmax)s OR xid = ANY(%(before_xip)s) OFFSET 0) fresh)"
        )
        self._mine: list[int] = []
        # Whether the current sweep is full. A full sweep can read rows that were already sent.
        self.is_full = True
        self.has_more = False
        self._in_sweep = False
        # The snapshots of the current and of the previous sweep. A snapshot is the first unassigned transaction number,
        # and the numbers of the transactions that were in progress.
        self._xmax, self._xip = 0, _NO_TRANSACTIONS
        self._before = 0, _NO_TRANSACTIONS
        self._last = 0
        self._next_full = 0.0
        # Whether a notification of a commit has come since `wait` last returned.
        self._is_noticed = False
        self._connection = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        self._driver = cast(Any, self._connection.connection.driver_connection)
        # Transfer bodies as binary data and not as text.
        self._cursor = self._driver.cursor(binary=True)
        # Do not return the connection to the pool, because the connection has locks and settings.
        self._connection.detach()
        try:
            self._set_up(lease)
        except BaseException:
            self.close()
            raise

    def _set_up(self, lease: float) -> None:
        if self._driver.info.server_version < 140000:
            raise RelayError("a relay needs PostgreSQL 14 or later, because older versions do not end idle sessions")
        milliseconds = max(1, round(silence_of(lease) * 1000))
        for setting in (
            f"idle_session_timeout = {milliseconds}",
            f"statement_timeout = {milliseconds}",
            # The two timeouts above have no effect while the server waits for the relay to read a result.
            f"tcp_user_timeout = {milliseconds}",
            # Do not use a generic plan, because it may be based on the statistics of an empty table.
            "plan_cache_mode = force_custom_plan",
            "enable_seqscan = off",
            "synchronous_commit = on",
        ):
            self._run(f"SET {setting}")
        if self._driver.info.host and not self._driver.info.host.startswith("/"):
            self._set_socket(milliseconds)
        # If notifications arrive together with the answer to a statement, psycopg passes them only to this handler.
        self._driver.add_notify_handler(self._notice)
        self._run(f"LISTEN {self._tables.channel}")
        self._run(
            f"INSERT INTO {self._relay} (partition, permitted, relayed)"
            f" SELECT partition, 0, 0 FROM generate_series(0, {PARTITIONS - 1}) partition ON CONFLICT DO NOTHING"
        )
        self._class, self._name = self._tables.relay_keys(self._connection)

    def _set_socket(self, milliseconds: int) -> None:
        """Make the operating system end the connection within the lease if the server does not answer."""
        seconds = max(1, milliseconds // 3000)
        with socket.socket(fileno=socket.dup(self._driver.fileno())) as copy:
            copy.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in (
                ("TCP_USER_TIMEOUT", milliseconds),
                ("TCP_KEEPIDLE", seconds),
                ("TCP_KEEPINTVL", seconds),
                ("TCP_KEEPCNT", 3),
            ):
                if hasattr(socket, name):
                    copy.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def _run(self, statement: str, **given: Any) -> Any:
        return self._connection.execute(text(statement), given)

    def join(self) -> None:
        """Become a member, so that partitions can belong to this relay."""
        self._run("SELECT pg_advisory_lock_shared(:class, :member)", **{"class": self._class, "member": PARTITIONS})

    def due(self) -> set[int]:
        """Return the partitions that belong to this relay according to the present members."""
        found = self._run(
            "SELECT pid, pid = pg_backend_pid(), objid::int FROM pg_locks"
            " WHERE locktype = 'advisory' AND objsubid = 2 AND granted AND classid = :class"
            " AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) ORDER BY pid",
            **{"class": self._class % (1 << 32)},
        ).all()
        members = [is_me for _, is_me, number in found if number == PARTITIONS]
        held = {number for _, is_me, number in found if is_me and number < PARTITIONS}
        if members.count(True) != 1 or not held >= set(self._mine):
            raise RelayError(
                "the database session has lost its locks; a relay needs its own connection, not through a pooler that "
                "shares sessions, such as PgBouncer with pool_mode=transaction"
            )
        mine = members.index(True)
        return {partition for partition in range(PARTITIONS) if partition % len(members) == mine}

    def take(self, partitions: Iterable[int]) -> dict[int, int]:
        """Lock each of the given partitions that no other relay has locked.

        For each partition that this call has locked, return the id up to which rows may have been sent.
        """
        taken = {}
        for partition in sorted(partitions):
            given = {"class": self._class, "partition": partition}
            if self._run("SELECT pg_try_advisory_lock(:class, :partition)", **given).scalar_one():
                self._mine.append(partition)
                query = f"SELECT permitted FROM {self._relay} WHERE partition = :partition"
                taken[partition] = int(self._run(query, partition=partition).scalar_one())
        return taken

    def give_up(self, doubts: Mapping[int, int]) -> None:
        """Unlock the partitions in `doubts`, and store each value: the id up to which rows may have been sent."""
        statement = f"UPDATE {self._relay} SET permitted = :doubt WHERE partition = :partition"
        for partition, doubt in doubts.items():
            self._run(statement, partition=partition, doubt=doubt)
            self._mine.remove(partition)
            given = {"class": self._class, "partition": partition}
            self._run("SELECT pg_advisory_unlock(:class, :partition)", **given)

    def start_over(self) -> None:
        """Begin a full sweep with the next `read`. Call this method only when all rows that were read are settled."""
        self._in_sweep = False
        self._before = 0, _NO_TRANSACTIONS
        self._next_full = 0.0

    def is_full_due(self) -> bool:
        """Return True if it is time for a full sweep, and no sweep is in progress. `start_over` begins a full sweep."""
        return not self._in_sweep and _monotonic() >= self._next_full > 0

    def read(self, limit: int, gone: Sequence[int] = ()) -> list[Row]:
        """Delete the confirmed rows `gone`, and read and permit the next rows, in one commit.

        When the method returns, the permitted ids are on disk, but perhaps not the deletes. After a crash of the
        database server, deleted rows may exist again, and are sent as second copies. The method sets `has_more` to True
        if the sweep may have further rows.
        """
        begins = not self._in_sweep
        xmax, xip = self._before
        if begins:
            self.is_full = xmax == 0
            # The statement below takes the new sweep's snapshot, which hides later rows, so it needs no upper limit.
            self._last, self._xmax, self._xip = 0, _AFTER_ALL, _NO_TRANSACTIONS
            if self.is_full:
                self._next_full = _monotonic() + FULL_PERIOD
                self._adopt_restored()
        # Use the driver directly. With SQLAlchemy the call would take twice as long.
        found = self._cursor.execute(
            self._find_first if begins and not self.is_full else self._find_next,
            {
                "last": self._last,
                "xmax": self._xmax,
                "xip": self._xip,
                "before_xmax": xmax,
                "before_xip": xip,
                "mine": self._mine,
                "limit": limit,
                "bytes": PAGE_BYTES,
                "gone": list(gone),
            },
        ).fetchall()
        if begins:
            _, first_unknown, in_progress = found[0][0].split(":")
            self._xmax = int(first_unknown)
            self._xip = [int(each) for each in in_progress.split(",")] if in_progress else _NO_TRANSACTIONS
        # If there are no rows, the result has only the snapshot.
        total = found[0][2] or 0
        rows = [Row(*row[3:]) for row in found] if total else []
        self.has_more = total == limit or total > len(rows)
        self._in_sweep = self.has_more
        if rows:
            self._last = rows[-1].id
        if not self.has_more:
            self._before = self._xmax, self._xip
        return rows

    def _adopt_restored(self) -> None:
        """Set transaction numbers that this server has not reached to 0; they come from another server's backup."""
        self._run(
            f"UPDATE {self._rows} SET xid = 0"
            " WHERE xid >= (SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint)"
        )

    def _statement(self, last: str) -> str:
        """Return the SQL for `read`. `last` is the SQL expression for the id after which the page begins."""
        return (
            "WITH now AS (SELECT pg_current_snapshot() AS snapshot),"
            f" gone AS (DELETE FROM {self._rows} WHERE id = ANY(CAST(%(gone)s AS bigint[])) RETURNING partition),"
            # Choose the rows before their bodies are read, because large bodies are stored outside the table.
            " page AS MATERIALIZED (SELECT * FROM ("
            "SELECT *, count(*) OVER () AS total, row_number() OVER (ORDER BY id) AS number,"
            " sum(octet_length(body)) OVER (ORDER BY id ROWS UNBOUNDED PRECEDING) - octet_length(body) AS size FROM ("
            f"SELECT id, partition, exchange, routing_key, properties, body FROM {self._rows}"
            f" WHERE id > {last} AND xid < %(xmax)s AND xid <> ALL(%(xip)s)"
            " AND (xid >= %(before_xmax)s OR xid = ANY(%(before_xip)s))"
            " AND partition = ANY(CAST(%(mine)s AS int[])) ORDER BY id LIMIT %(limit)s) limited) sized"
            " WHERE size < %(bytes)s),"
            " last AS (SELECT max(id) AS id FROM page),"
            f" needed AS (SELECT EXISTS (SELECT FROM page JOIN {self._relay} relay USING (partition)"
            " WHERE page.id > relay.permitted) AS is_needed),"
            " counted AS (SELECT partition, count(*) AS relayed FROM gone GROUP BY partition),"
            f" written AS (UPDATE {self._relay} relay SET permitted ="
            f" CASE WHEN is_needed THEN greatest(relay.permitted, last.id + {AHEAD}) ELSE relay.permitted END,"
            " relayed = relay.relayed + coalesce(counted.relayed, 0)"
            " FROM last, needed, unnest(CAST(%(mine)s AS int[])) AS mine(partition) LEFT JOIN counted USING (partition)"
            " WHERE relay.partition = mine.partition AND (is_needed OR counted.relayed IS NOT NULL))"
            " SELECT CASE WHEN page.id IS NULL OR number = 1 THEN snapshot::text END AS snapshot,"
            " CASE WHEN page.id IS NULL OR number = 1 THEN"
            " set_config('synchronous_commit', CASE WHEN is_needed THEN 'on' ELSE 'off' END, true) END, total,"
            " id, partition, exchange, routing_key, properties, body"
            " FROM now CROSS JOIN needed LEFT JOIN page ON true ORDER BY id"
        )

    def delete(self, gone: Sequence[int]) -> None:
        self._run(
            f"WITH gone AS (DELETE FROM {self._rows} WHERE id = ANY(CAST(:gone AS bigint[])) RETURNING partition),"
            " news AS (SELECT partition, count(*) AS relayed FROM gone GROUP BY partition)"
            f" UPDATE {self._relay} relay SET relayed = relay.relayed + news.relayed"
            " FROM news, set_config('synchronous_commit', 'off', true) WHERE relay.partition = news.partition",
            gone=list(gone),
        )

    def set_aside(self, rows: Sequence[Aside]) -> None:
        """Move rows to the table of failed rows."""
        names = (*self._tables.message_columns, "created_at", "reply")
        values = (f":{name}" if name in Aside._fields else name for name in names)
        statement = text(
            f"WITH gone AS (DELETE FROM {self._rows} WHERE id = :id RETURNING *)"
            f" INSERT INTO {self._failed} (id, {', '.join(names)})"
            # If the sequence of ids was reset, the table of failed rows may already have the id.
            f" SELECT CASE WHEN EXISTS (SELECT FROM {self._failed} WHERE id = :id)"
            f" THEN (SELECT max(id) + 1 FROM {self._failed}) ELSE id END,"
            f" {', '.join(values)} FROM gone"
        )
        for row in rows:
            self._connection.execute(statement, row._asdict())

    def ping(self) -> None:
        """Execute a trivial query, so that the server does not end the session as idle."""
        self._run("SELECT 1")

    def say(self, holds: str) -> None:
        """Show the holds of the relay in the server's list of sessions, which is in memory and not on disk."""
        self._run("SELECT set_config('application_name', :name, false)", name=self._name + holds)

    def wait(self, wake: socket.socket, timeout: float) -> bool:
        """Wait at most `timeout` seconds for a commit or a byte on `wake`. Return True if there may be new rows."""
        driver = self._driver.pgconn
        self._take_notices()
        if not self._is_noticed and driver.socket in wait_readable((driver.socket, wake.fileno()), timeout):
            self._take_notices()
        noticed, self._is_noticed = self._is_noticed, False
        return noticed

    def _take_notices(self) -> None:
        driver = self._driver.pgconn
        driver.consume_input()
        # Take all notifications, because several commits need only one read.
        while driver.notifies() is not None:
            self._is_noticed = True

    def _notice(self, _notice: Any) -> None:
        self._is_noticed = True

    def close(self) -> None:
        """End the session and its locks."""
        self._driver.close()
        # The connection may be broken, so ignore errors.
        with suppress(Exception):
            self._connection.close()
