"""A producer with an outbox, without threads and sockets."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from qflow_client import Message
from qflow_client.core.protocol import ProducerProtocol
from qflow_client.outbox import Outbox
from qflow_client.outbox.spilled import Spilled
from qflow_client.outbox.store import OutboxStore
from qflow_client.outbox.writer import StoreStep, Writer
from qflow_client.receipt import Receipt
from qflow_client.settings import ProducerSettings

FRAME_MAX = 4096
MARK = "x-qflow-republished"


class SpilledReceipt(Spilled, Receipt):
    __slots__ = ("__weakref__", "_id", "_path", "_sequence")


class Kept:
    """A producer whose `Writer` works only in `turn`.

    Args:
        path: file of the outbox.
        prefix: prefix of the message ids.
        opened: whether the producer has an open channel.
        settings: settings of the producer.
    """

    def __init__(self, path: Path, prefix: str = "p-", *, opened: bool = True, **settings: Any) -> None:
        found = ProducerSettings(outbox=str(path), **{"routing_key": "q"} | settings)
        self.now = time.monotonic()
        self.outbox = Outbox(path, max_bytes=found.outbox_max_bytes)
        offset = time.time() - self.now
        self.protocol = ProducerProtocol(found, id_prefix=prefix, now=self.now, wall_offset=offset)
        #: The commits that the writer has reported.
        self.committed: list[tuple[int, Exception | None]] = []
        self.writer = Writer(self.outbox, found, self.step, lambda *said: self.committed.append(said))
        self.store = OutboxStore(self.protocol, self.outbox, SpilledReceipt, self.writer, self.now)
        self.writer.store = self.store
        self.backlog = self.store.backlog
        # Whether the writer has to repeat a failed commit.
        self._again = False
        #: The woken waiters, except the writer.
        self.woken: list[Any] = []
        if opened:
            self.protocol.channel_opened(1, FRAME_MAX, self.now)

    def step(self, step: StoreStep) -> None:
        """Execute a step of the store."""
        step(self.now)

    def turn(self) -> None:
        """Let the writer do its tasks. A failed task is repeated in the next call."""
        rung, self._again = self._again, False
        while self.protocol.reports.wake or rung:
            wake, self.protocol.reports.wake = self.protocol.reports.wake, []
            self.woken += [waiter for waiter in wake if waiter is not self.writer]
            if self.writer in wake or rung:
                self._again = not self.writer.work() or self._again
            rung = False

    def send(self, payload: bytes | Message, key: str = "q", *, spills: bool = False) -> Receipt | None:
        """Send a message, and wait until it is on disk, as the producers do."""
        receipt: Receipt | None = self.store.send(payload, "", key, self.now, spills=spills)
        if receipt is not None:
            self.outbox.wait_durable(self.outbox.last)
        return receipt

    def write(self) -> bytes:
        """Write all bytes that may be written, and return them."""
        written = b""
        while data := self.protocol.data_to_write(1 << 20):
            self.protocol.advance(len(data), self.now)
            written += data
        return written

    def crash(self) -> None:
        """Simulate the death of the process: changes that were only noted are lost, and the lock is released."""
        crash(self.outbox)


def crash(outbox: Outbox) -> None:
    """Simulate the death of the process: changes that were only noted are lost, and the lock is released."""
    outbox._file.close()
    outbox._lock_file.release()


def leave(path: Path, *bodies: bytes, permit: bool = False) -> list[int]:
    """Put messages into an outbox, and return their sequence numbers."""
    with Outbox(path) as outbox:
        return [outbox.put(body, "", "q", f"left-{body.decode():.20}", permit=permit) for body in bodies]


def change(path: Path, statement: str) -> None:
    """Change the file with an SQL statement that an outbox never executes."""
    with closing(sqlite3.connect(path)) as file, file:
        file.execute(statement)
