"""Transaction mode of a channel: published messages and settlements wait for ``Tx.Commit``.

A message is routed when it is published, as in RabbitMQ. If a queue was deleted before the commit, the message goes to
a new queue with the same name, if any. If a queue refuses its messages, the whole commit is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import pamqp.base
from pamqp import commands

from qflow_client.broker.core import wire
from qflow_client.broker.core.channelflow import ChannelFlow
from qflow_client.broker.core.confirms import Confirms
from qflow_client.broker.core.consuming import Consuming, Delivery
from qflow_client.broker.core.controls import Controls
from qflow_client.broker.core.dropping import drops_each
from qflow_client.broker.core.entries import QueueView, StoredMessage
from qflow_client.broker.core.errors import ChannelException, ReplyCode
from qflow_client.broker.core.exchange import Target
from qflow_client.broker.core.output import Output
from qflow_client.broker.core.queue import Queue
from qflow_client.broker.core.routing import Router
from qflow_client.broker.core.virtualhost import VirtualHost

__all__ = ["TRANSACTION_METHODS", "Settlement", "Transaction", "add_message", "add_to_transaction", "roll_back"]

#: Maximum sum of settled deliveries and messages in a transaction. A message counts once for each of its queues.
#: A commit takes about 5 µs for each, and cannot be divided into slices.
MAX_OPERATIONS = 8_000


@dataclass(frozen=True, slots=True)
class Settlement:
    """An ack, nack or reject that waits for the commit."""

    deliveries: tuple[Delivery, ...]
    acked: bool
    requeue: bool


@dataclass(slots=True)
class Transaction:
    """The published messages and the settlements since the last commit or rollback.

    Attributes:
        publishes: messages in the order of publishing, each with its target and its queues.
        settlements: settlements in the order of their arrival.
        size: approximate bytes of the published messages in memory.
        operations: number of published messages and settled deliveries, counted as for `MAX_OPERATIONS`.
    """

    publishes: list[tuple[StoredMessage, Target, tuple[Queue, ...]]] = field(default_factory=list)
    settlements: list[Settlement] = field(default_factory=list)
    size: int = 0
    operations: int = 0

    def refusal(self, destinations: list[tuple[Queue, ...]]) -> str | None:
        """Return why a queue refuses the transaction; ``None`` if every queue has room for all messages that it gets.

        `destinations` has the queues of each published message.
        """
        counts: dict[QueueView, int] = {}
        sizes: dict[QueueView, int] = {}
        largest: dict[QueueView, int] = {}
        for settlement in self.settlements:
            if settlement.requeue:
                continue
            for delivery in settlement.deliveries:
                entry = delivery.entry
                if not entry.is_gone:
                    counts[entry.queue] = counts.get(entry.queue, 0) - 1
                    sizes[entry.queue] = sizes.get(entry.queue, 0) - entry.message.size
        for (message, _, _), queues in zip(self.publishes, destinations, strict=True):
            for queue in queues:
                counts[queue] = counts.get(queue, 0) + 1
                sizes[queue] = sizes.get(queue, 0) + message.size
                largest[queue] = max(largest.get(queue, 0), message.size)
                reason = queue.refusal(sizes[queue], counts[queue], largest[queue], drops=1)
                if reason is None and queue.has_line:
                    # A commit cannot wait, and must not overtake waiting publishes.
                    reason = f"other publishes wait for room in queue '{queue.name}'"
                if reason is not None:
                    return reason
        return None


class TransactionChannel(Protocol):
    """The part of the channel that the functions of this module need."""

    number: int
    host: VirtualHost
    router: Router
    output: Output
    controls: Controls
    consuming: Consuming
    flow: ChannelFlow
    confirms: Confirms | None
    #: The open transaction; None without transaction mode.
    transaction: Transaction | None

    def become_producer(self) -> None:
        """Record that the channel publishes, or is in confirm or transaction mode."""

    def return_message(self, message: StoredMessage) -> None:
        """Return a mandatory message that no queue gets."""

    def count_rates(self, message: StoredMessage, queues: tuple[Queue, ...]) -> None:
        """Count a message against the rate limits."""


def _open(channel: TransactionChannel) -> Transaction:
    if channel.transaction is None:
        raise ChannelException(
            ReplyCode.PRECONDITION_FAILED, "the channel is not in transaction mode; send Tx.Select first"
        )
    return channel.transaction


def add_message(channel: TransactionChannel, message: StoredMessage, target: Target) -> None:
    """Route a published message, and add it to the open transaction.

    Raises:
        ChannelException: 406 if the transaction is too large, or if the message goes to too many queues.
    """
    queues = channel.router.destinations(message, target)
    _open(channel).publishes.append((message, target, queues))
    add_to_transaction(channel, max(1, len(queues)), message.footprint)


def add_to_transaction(channel: TransactionChannel, operations: int, size: int = 0) -> None:
    """Count `operations` (see `MAX_OPERATIONS`) and `size` bytes that were added to the open transaction.

    Raises:
        ChannelException: 406 if the transaction is too large.
    """
    transaction = _open(channel)
    transaction.operations += operations
    _count_bytes(channel, size)
    if transaction.operations > MAX_OPERATIONS:
        raise ChannelException(
            ReplyCode.PRECONDITION_FAILED,
            f"the transaction has more than {MAX_OPERATIONS} messages and acks, or messages for too many queues; "
            "it is rolled back; commit more often",
        )


def _count_bytes(channel: TransactionChannel, change: int) -> None:
    _open(channel).size += change
    if channel.host.journal is not None:
        channel.host.journal.unfinished += change


def _select(channel: TransactionChannel, method: commands.Tx.Select) -> None:
    if channel.confirms is not None:
        raise ChannelException(ReplyCode.PRECONDITION_FAILED, "a channel in confirm mode cannot have transactions")
    if channel.transaction is None:
        channel.transaction = Transaction()
    channel.output.write(wire.method(channel.number, commands.Tx.SelectOk()))
    channel.become_producer()


def _commit(channel: TransactionChannel, method: commands.Tx.Commit) -> None:
    transaction = _open(channel)
    with channel.host.dead_letters:
        _commit_whole(channel, transaction)
    if channel.host.journal is not None:
        # Call `divide` only after the commit, so that one batch on disk has all records of the transaction.
        channel.host.journal.divide()


def _commit_whole(channel: TransactionChannel, transaction: Transaction) -> None:
    """Execute the whole transaction. If a queue refuses a message, roll back and raise `ChannelException` 406."""
    destinations = [_present(queues, channel.router.queues) for _, _, queues in transaction.publishes]
    reason = transaction.refusal(destinations)
    if channel.controls.nack_publishes and transaction.publishes:
        reason = "the broker refuses every publish now"
    if reason is not None:
        roll_back(channel)
        raise ChannelException(ReplyCode.PRECONDITION_FAILED, f"queue full, the transaction is rolled back: {reason}")
    _count_bytes(channel, -transaction.size)
    channel.transaction = Transaction()
    touched: dict[Queue, None] = {}
    for settlement in transaction.settlements:
        channel.consuming.settle(settlement.deliveries, acked=settlement.acked, requeue=settlement.requeue)
    for (message, target, _), queues in zip(transaction.publishes, destinations, strict=True):
        if not queues and target.mandatory:
            channel.return_message(message)
        for queue in queues:
            # `Queue.tick` drops any further messages. Until then, the broker handles no more frames of the client.
            queue.enqueue(message, channel.flow, drops=1)
            touched[queue] = None
        channel.count_rates(message, queues)
    commit_ok = wire.method(channel.number, commands.Tx.CommitOk())
    channel.output.write_when_durable(commit_ok, topology_only=False)
    for queue in touched:
        queue.after_publish(drops_each(len(touched)))


def _present(queues: tuple[Queue, ...], by_name: Mapping[str, Queue]) -> tuple[Queue, ...]:
    """Replace each deleted queue by the queue that has its name now. If there is none, omit the deleted queue."""
    if not any(queue.is_deleted for queue in queues):
        return queues
    return tuple(by_name[queue.name] for queue in queues if queue.name in by_name)


def _rollback(channel: TransactionChannel, method: commands.Tx.Rollback) -> None:
    roll_back(channel)
    channel.output.write(wire.method(channel.number, commands.Tx.RollbackOk()))


def roll_back(channel: TransactionChannel) -> None:
    """Discard messages and settlements. The settled deliveries are unacked again, but are not delivered again."""
    transaction = _open(channel)
    _count_bytes(channel, -transaction.size)
    channel.transaction = Transaction()
    channel.consuming.restore_unacked(
        delivery for settlement in transaction.settlements for delivery in settlement.deliveries
    )


TRANSACTION_METHODS: dict[type[pamqp.base.Frame], Callable[[TransactionChannel, Any], None]] = {
    commands.Tx.Select: _select,
    commands.Tx.Commit: _commit,
    commands.Tx.Rollback: _rollback,
}
