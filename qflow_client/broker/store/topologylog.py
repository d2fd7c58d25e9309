"""Collects changes of durable queues, exchanges and bindings for the next batch of the journal. No I/O."""

from __future__ import annotations

from itertools import count
from typing import NamedTuple

from qflow_client.amqp.fields import encode_table
from qflow_client.broker.core.errors import ChannelException, ReplyCode

__all__ = ["Change", "TopologyLog"]


class Change(NamedTuple):
    """A change of a durable queue, exchange or binding.

    Attributes:
        kind: ``queue``, ``exchange`` or ``binding``; for a deletion, ``no_queue``, ``no_exchange`` or ``no_binding``;
            ``deleted`` if messages are still leaving a deleted queue.
        values: the row to insert, without its checksum. For a deletion, the values that identify the row to delete.
    """

    kind: str
    values: tuple[object, ...]


class TopologyLog:
    """The changes of durable queues, exchanges and bindings that are not in a `Batch` yet."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self.changes: list[Change] = []

    def go_on_from(self, number: int) -> None:
        """Give new queues numbers above `number`, which is the highest queue number in the store."""
        self._numbers = count(number + 1)

    def take(self) -> list[Change]:
        changes, self.changes = self.changes, []
        return changes

    def number_of(self, name: str, auto_delete: bool, arguments: dict[str, object]) -> int:
        table = self._table(f"queue '{name}'", arguments)
        number = next(self._numbers)
        self.changes.append(Change("queue", (number, name, auto_delete, table)))
        return number

    def queue_gone(self, name: str) -> None:
        self.changes.append(Change("no_queue", (name,)))

    def messages_leave(self, number: int) -> None:
        self.changes.append(Change("deleted", (number,)))

    def exchange(self, name: str, kind: str, auto_delete: bool, internal: bool, arguments: dict[str, object]) -> None:
        table = self._table(f"exchange '{name}'", arguments)
        self.changes.append(Change("exchange", (name, kind, auto_delete, internal, table)))

    def exchange_gone(self, name: str) -> None:
        self.changes.append(Change("no_exchange", (name,)))

    def binding(
        self,
        source: str,
        kind: str,
        destination: str,
        routing_key: str,
        arguments: dict[str, object],
        *,
        gone: bool = False,
    ) -> None:
        table = self._table(f"binding of '{destination}' to '{source}'", arguments)
        values = source, kind, destination, routing_key, table
        self.changes.append(Change("no_binding" if gone else "binding", values))

    @staticmethod
    def _table(what: str, arguments: dict[str, object]) -> bytes:
        try:
            return encode_table(arguments, "arguments")
        except (TypeError, ValueError) as error:
            raise ChannelException(
                ReplyCode.PRECONDITION_FAILED, f"{what} cannot be durable: {error}; leave that argument out"
            ) from None
