"""The errors of qflow_client.

`ProducerFlowed` and its subclasses mean that the message was not sent and never will be. `DeliveryError` and
`UndeliveredMessages` report final outcomes of admitted messages. At a `ConfirmTimeout` or the outbox's `NotDurable`,
the outcomes of admitted messages are not known yet.
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


def _remade(kind: type[QflowError], arguments: tuple[object, ...]) -> QflowError:
    error = kind.__new__(kind)
    error.args = arguments
    return error


class QflowError(Exception):
    """The base class of most errors of this package."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Process pools pickle errors. `Exception.__reduce__` would pass only the text to `__init__`.
        return _remade, (type(self), self.args), self.__dict__


class WrongLoop(QflowError, RuntimeError):
    """A method of an `AsyncProducer` was called in an event loop that is not the producer's. The call had no effect."""


class SettingsError(QflowError, ValueError):
    """A setting or argument has a value that is not allowed, or an unknown name."""


class ConnectionFailed(QflowError, ConnectionError):
    """No host let the client open a channel, or a Spark reader lost its connection. The text contains the reasons."""


class ProducerClosed(QflowError):
    """The producer accepts no messages: it is not connected yet, was closed or dropped, or could not reconnect.

    Attributes:
        message: the message that was not sent; ``None`` if there was none.
        exchange: exchange of the message; ``None`` if there was no message.
        routing_key: routing key of the message; ``None`` if there was no message.
        receipts: receipts of the messages that the same call of `send_many` admitted before the error.
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
    """The producer is blocked (flowed). The message was not sent and never will be (A4 D1).

    Attributes:
        holds: the holds on the producer, oldest first, with times in seconds since 1970.
        waited: seconds for which the call has waited.
        message: the message that was not sent, as the application has passed it; ``None`` if there was none.
        exchange: exchange of the message; ``None`` if there was no message.
        routing_key: routing key of the message; ``None`` if there was no message.
        receipts: receipts of the messages that the same call of `send_many` admitted before the error.
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
        why = ", ".join(map(str, self.holds)) or "other sends wait first"
        waited_text = f" within {waited:.3g} s" if waited else ""
        super().__init__(
            f"the message was not sent{waited_text}, because the producer is blocked (flowed): {why}"
            f"{'; ' if advice else ''}{advice}"
        )


class FlowControlTimeout(ProducerFlowed, TimeoutError):
    """The producer was still flowed after the timeout. The message was not sent and never will be (A4)."""


class NestedCall(ProducerFlowed):
    """A call would have to wait in a place where it cannot wait. The message was not sent and never will be (E2).

    A call on the I/O thread of a connection cannot wait. A signal handler or finalizer that interrupts a step (a change
    of a producer's state) cannot wait. Code with a lock that a step needs, such as a log handler's lock, cannot wait.
    """

    def __init__(
        self, what: str, message: Any = None, *, exchange: str | None = None, routing_key: str | None = None
    ) -> None:
        super().__init__((), 0.0, message, exchange=exchange, routing_key=routing_key)
        text = (
            f"{what} would have to wait for itself here: it interrupts a step of a producer, runs on a thread that "
            "producers need, or holds a lock that a producer waits for; call it from the application's own code, not "
            "from a signal handler, a finalizer or a log handler"
        )
        self.args = (text,)


class ConfirmTimeout(QflowError, TimeoutError):
    """The broker has not confirmed admitted messages in time. Their outcomes are not known yet.

    Attributes:
        unsettled: number of messages that were not settled when the call stopped waiting.
    """

    def __init__(self, text: str, unsettled: int = 1) -> None:
        super().__init__(text)
        self.unsettled = unsettled


class DeliveryError(QflowError):
    """An admitted message was not delivered, or its outcome is unknown.

    Attributes:
        receipt: receipt of the message.
    """

    def __init__(self, text: str, receipt: Receipt) -> None:
        super().__init__(text)
        self.receipt = receipt


class MessageNacked(DeliveryError):
    """The broker has not accepted the message, and has answered with ``Basic.Nack``.

    If the message is for several queues, some of them may have accepted it. So a second send may cause a second copy.
    """


class MessageReturned(DeliveryError):
    """The message was mandatory, and no queue has received it (``Basic.Return``).

    Attributes:
        reply_code: the broker's reply code, such as 312.
        reply_text: the broker's reply text.
    """

    def __init__(self, text: str, receipt: Receipt, reply_code: int, reply_text: str) -> None:
        super().__init__(text, receipt)
        self.reply_code = reply_code
        self.reply_text = reply_text


class MessageRejected(DeliveryError):
    """The broker closed the channel because of this message.

    Attributes:
        reply_code: the broker's reply code, such as 404.
        reply_text: the broker's reply text.
    """

    def __init__(self, text: str, receipt: Receipt, reply_code: int, reply_text: str) -> None:
        super().__init__(text, receipt)
        self.reply_code = reply_code
        self.reply_text = reply_text


class MessageFailed(DeliveryError):
    """The message was admitted but never written. If it is sent again, no second copy is possible."""


class OutcomeUnknown(DeliveryError):
    """The message was written at least in part, and the broker's answer is missing.

    The connection or the channel has ended, or `delivery_timeout` has passed. A second send may cause a second copy.
    """


class MessageStored(DeliveryError):
    """The message is still in the outbox. The next producer with this outbox sends the message, unless it is damaged.

    The text contains the reason: the producer was closed, ``outbox_keep_undelivered`` keeps the undelivered message, or
    the message is damaged. ``qflow outbox drop`` removes a damaged message.
    """


class UndeliveredMessages(QflowError):
    """Admitted messages were not delivered, and the application has not read their failures.

    Attributes:
        receipts: receipts of undelivered messages, in the order of admission. Messages in the outbox may be missing.
        stored: number of messages that stay in the outbox. The next producer sends them; the application must not.
        dropped: number of further failed messages, whose receipts were dropped because of ``max_failed_bytes``, or
            could not be read from a deleted outbox in time.
    """

    def __init__(self, receipts: Sequence[Receipt], text: str = "", *, stored: int = 0, dropped: int = 0) -> None:
        self.receipts = tuple(receipts)
        self.dropped = dropped
        ours = [receipt for receipt in self.receipts if not receipt.is_stored]
        # `stored` does not count damaged messages in the outbox, but `receipts` may contain their receipts.
        self.stored = stored = max(stored, len(self.receipts) - len(ours))
        unknown = sum(receipt.may_have_arrived for receipt in ours)
        first = f"; the first: {self.receipts[0].describe()}" if self.receipts else ""
        kept = f", {stored} that stay in the outbox, for the next producer on it (.stored)" if stored else ""
        lost = (
            f", {dropped} without receipts, because max_failed_bytes was reached or the outbox was deleted (.dropped)"
            if dropped
            else ""
        )
        super().__init__(
            text
            or f"{len(ours) + stored + dropped} admitted messages were not delivered: {len(ours) - unknown} safe to "
            f"send again (.unsent), {unknown} that may have arrived (.unknown){kept}{lost}{first}"
        )

    @property
    def unsent(self) -> tuple[RoutedMessage, ...]:
        """Messages that have certainly not arrived, and can be sent again without second copies.

        ``producer.send(message)`` sends a message of this tuple to its former exchange and routing key.
        """
        return tuple(receipt.message for receipt in self.receipts if not receipt.may_have_arrived)

    @property
    def unknown(self) -> tuple[RoutedMessage, ...]:
        """Messages that may have arrived. If they are sent again, second copies with the same message ids are possible.

        ``producer.send(message)`` sends a message of this tuple to its former exchange and routing key.
        """
        return tuple(receipt.message for receipt in self.receipts if receipt.may_have_arrived and not receipt.is_stored)
