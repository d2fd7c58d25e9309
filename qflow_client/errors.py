"""What qflow_client raises.

Two families never mix. `ProducerFlowed` and its subclass mean that the message was not sent and never will be. All that
is about a message that *was* admitted is a `DeliveryError` (its fate is known, or known to be unknown) or a
`ConfirmTimeout` (its fate is not known yet).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from qflow_client.flow import Hold

if TYPE_CHECKING:
    from qflow_client.message import RoutedMessage
    from qflow_client.receipt import Receipt

__all__ = [
    "ConfirmTimeout",
    "ConnectionFailed",
    "DeliveryError",
    "FlowControlTimeout",
    "MessageFailed",
    "MessageNacked",
    "MessageRejected",
    "MessageReturned",
    "MessageStored",
    "NestedCall",
    "OutcomeUnknown",
    "ProducerClosed",
    "ProducerFlowed",
    "QflowError",
    "SettingsError",
    "UndeliveredMessages",
]


class QflowError(Exception):
    """The base of all that this package raises on purpose."""


class SettingsError(QflowError, ValueError):
    """A setting has a value that is not allowed; the text names the setting, the value and what is allowed."""


class ConnectionFailed(QflowError, ConnectionError):
    """No connection, or no channel on it, could be had from any of the given hosts."""


class ProducerClosed(QflowError):
    """The producer takes no more messages: it was closed, or lost its connection. This message was not sent.

    Attributes:
        message: what was to be sent; ``None`` where no message was involved.
        exchange: where it was to go; ``None`` likewise.
        routing_key: with which key; ``None`` likewise.
        receipts: of what the same `send_many` had admitted before.
    """

    receipts: Sequence[Receipt] = ()

    def __init__(
        self, text: str, message: Any = None, *, exchange: str | None = None, routing_key: str | None = None
    ) -> None:
        super().__init__(text)
        self.message = message
        self.exchange = exchange
        self.routing_key = routing_key


class ProducerFlowed(QflowError):
    """The producer is flowed. The message was not sent and never will be: not one byte of it is on the wire (A4 D1).

    Attributes:
        holds: every hold that was on the producer, the oldest first, each with when it was raised, in seconds since
            1970.
        waited: seconds that the call was blocked.
        message: what was to be sent, as it was given.
        exchange: where it was to go; ``None`` if no message was involved.
        routing_key: with which key; ``None`` likewise.
        receipts: of what the same `send_many` had admitted before.
    """

    receipts: Sequence[Receipt] = ()

    def __init__(
        self,
        holds: Sequence[Hold],
        waited: float,
        message: Any,
        advice: str = "",
        *,
        exchange: str | None = None,
        routing_key: str | None = None,
    ) -> None:
        self.holds = tuple(holds)
        self.waited = waited
        self.message = message
        self.exchange = exchange
        self.routing_key = routing_key
        why = ", ".join(map(str, self.holds)) or "others wait before it"
        waited_text = f" within {waited:.3g} s" if waited else ""
        super().__init__(
            f"the message was not sent{waited_text}, the producer is flowed: {why}{'; ' if advice else ''}{advice}"
        )


class FlowControlTimeout(ProducerFlowed, TimeoutError):
    """The producer was still flowed when the time to wait was up. The message was not sent and never will be (A4)."""


class NestedCall(ProducerFlowed):
    """A call would have had to wait where nothing can be waited for, and nothing has happened (E2).

    It came from inside a step of a producer, by a signal handler, a finalizer or a log handler; or on the thread that a
    connection depends on; or it held a lock for which a step of a producer waited, such as that of a log handler. What
    it was to send was not sent and never will be.
    """

    def __init__(
        self, what: str, message: Any = None, *, exchange: str | None = None, routing_key: str | None = None
    ) -> None:
        super().__init__((), 0.0, message, exchange=exchange, routing_key=routing_key)
        text = (
            f"{what} would have to wait for a step of a producer that it interrupts, for the thread that it is on, or "
            "for a step that waits for a lock that it holds: call it from the application's own code, not from a "
            "signal handler, a finalizer or a log handler"
        )
        self.args = (text,)


class ConfirmTimeout(QflowError, TimeoutError):
    """The broker has not confirmed in time. The message was admitted; its outcome is not known yet.

    Attributes:
        unsettled: how many messages the call was waiting for still.
    """

    def __init__(self, text: str, unsettled: int = 1) -> None:
        super().__init__(text)
        self.unsettled = unsettled


class DeliveryError(QflowError):
    """A message was admitted and not delivered, or nobody knows.

    Attributes:
        receipt: of the message.
    """

    def __init__(self, text: str, receipt: Receipt) -> None:
        super().__init__(text)
        self.receipt = receipt


class MessageNacked(DeliveryError):
    """The broker answered with ``Basic.Nack``: it did not take responsibility for the message.

    A second copy may result from sending it again: of several queues, only one need have refused it.
    """


class MessageReturned(DeliveryError):
    """The message was mandatory and no queue was there for it (``Basic.Return``).

    Attributes:
        reply_code: the broker's, such as 312.
        reply_text: the broker's words.
    """

    def __init__(self, text: str, receipt: Receipt, reply_code: int, reply_text: str) -> None:
        super().__init__(text, receipt)
        self.reply_code = reply_code
        self.reply_text = reply_text


class MessageRejected(DeliveryError):
    """The broker closed the channel over this message.

    Attributes:
        reply_code: the broker's, such as 404.
        reply_text: the broker's words.
    """

    def __init__(self, text: str, receipt: Receipt, reply_code: int, reply_text: str) -> None:
        super().__init__(text, receipt)
        self.reply_code = reply_code
        self.reply_text = reply_text


class MessageFailed(DeliveryError):
    """The message was admitted and never written. It is safe to send it again."""


class OutcomeUnknown(DeliveryError):
    """The message was written, and the connection ended before the broker answered.

    A second copy may result from sending it again.
    """


class MessageStored(DeliveryError):
    """The message is in the outbox still, and the next producer on that outbox sends it.

    Its producer was closed, or it was not delivered, as the text says, and ``outbox_keep_undelivered`` is on. Or it is
    damaged there, as the text says: then it stays until ``qflow outbox drop``.
    """


class UndeliveredMessages(QflowError):
    """Admitted messages were not delivered, and nobody has looked at their receipts.

    Attributes:
        receipts: of all of them, in the order of admission; but of those in the outbox only if there still are any.
        stored: how many stay in the outbox. The next producer on it sends them, so nobody else is to.
        dropped: how many more failed before. Their receipts were dropped, because failed messages took more than
            ``max_failed_bytes``.
    """

    def __init__(self, receipts: Sequence[Receipt], text: str = "", *, stored: int = 0, dropped: int = 0) -> None:
        self.receipts = tuple(receipts)
        self.dropped = dropped
        ours = [receipt for receipt in self.receipts if not receipt.is_stored]
        # Of what is set aside in an outbox as damaged only its receipt tells.
        self.stored = stored = max(stored, len(self.receipts) - len(ours))
        unknown = sum(receipt.may_have_arrived for receipt in ours)
        first = f"; the first: {self.receipts[0].describe()}" if self.receipts else ""
        kept = f", {stored} that stay in the outbox, for the next producer on it (.stored)" if stored else ""
        lost = f", {dropped} whose receipts were dropped (.dropped), see max_failed_bytes" if dropped else ""
        super().__init__(
            text
            or f"{len(ours) + stored + dropped} admitted messages were not delivered: {len(ours) - unknown} safe to "
            f"send again (.unsent), {unknown} that may have arrived (.unknown){kept}{lost}{first}"
        )

    @property
    def unsent(self) -> tuple[RoutedMessage, ...]:
        """Messages known not to have been delivered: sending them again makes no second copy.

        ``producer.send(message)`` sends each to the exchange and the routing key that it was sent to before.
        """
        return tuple(receipt.message for receipt in self.receipts if not receipt.may_have_arrived)

    @property
    def unknown(self) -> tuple[RoutedMessage, ...]:
        """Messages that may have arrived: sending them again may make a second copy. They have their message ids.

        ``producer.send(message)`` sends each to the exchange and the routing key that it was sent to before.
        """
        return tuple(receipt.message for receipt in self.receipts if receipt.may_have_arrived and not receipt.is_stored)
