"""What a channel in transaction mode has done since its last commit.

Publishes and settlements are kept and do nothing until ``Tx.Commit``. The commit is refused as a whole if any queue has
no room for what the transaction as a whole leaves there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from qflow_client.broker.core.consuming import Delivery
from qflow_client.broker.core.entries import QueueView, StoredMessage
from qflow_client.broker.core.exchange import Target
from qflow_client.broker.core.queue import Queue

__all__ = ["Settlement", "Transaction"]


@dataclass(frozen=True, slots=True)
class Settlement:
    """An ack, nack or reject that waits for the commit.

    Attributes:
        deliveries: what it is about.
        acked: whether it is an ack.
        requeue: whether what is not acked goes back to its queue.
    """

    deliveries: tuple[Delivery, ...]
    acked: bool
    requeue: bool


@dataclass(slots=True)
class Transaction:
    """Publishes and settlements between two commits.

    Attributes:
        publishes: messages in their order, each with where it goes.
        settlements: in their order.
        size: bytes that the publishes take in memory, about.
    """

    publishes: list[tuple[StoredMessage, Target]] = field(default_factory=list)
    settlements: list[Settlement] = field(default_factory=list)
    size: int = 0

    def refusal(self, destinations: list[tuple[Queue, ...]]) -> str | None:
        """Why the transaction cannot be committed: a queue that has no room for all of it.

        Args:
            destinations: the queues of each publish.
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
        for (message, _), queues in zip(self.publishes, destinations, strict=True):
            for queue in queues:
                counts[queue] = counts.get(queue, 0) + 1
                sizes[queue] = sizes.get(queue, 0) + message.size
                largest[queue] = max(largest.get(queue, 0), message.size)
                reason = queue.refusal(sizes[queue], counts[queue], largest[queue])
                if reason is not None:
                    return reason
        return None
