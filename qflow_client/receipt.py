"""A receipt shows the outcome of one message."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any, cast

from qflow_client.errors import (
    ConfirmTimeout,
    DeliveryError,
    MessageFailed,
    MessageNacked,
    MessageRejected,
    MessageReturned,
    MessageStored,
    OutcomeUnknown,
)
from qflow_client.message import REPUBLISHED, Message, RoutedMessage

if TYPE_CHECKING:
    from qflow_client.amqp.frames import Prepared, Route

__all__ = ["COSTS_CONNECTION", "RECEIPT_OVERHEAD", "UNDELIVERED", "Outcome", "Receipt"]

#: The code in a receipt's reply if the producer gave the message up because it costs the connection (see `suspects`).
COSTS_CONNECTION = -1

_NO_ROUTE = 312
_NOT_FOUND = 404
# The header of a second copy, as it is in the encoded properties.
_MARK = REPUBLISHED.encode()

#: Approximate bytes of memory of a receipt and its message, without the body.
RECEIPT_OVERHEAD = 512


class Outcome(StrEnum):
    """What has happened to an admitted message."""

    #: The broker has accepted the message (``Basic.Ack``).
    CONFIRMED = "confirmed"
    #: The message was written by a producer without confirms.
    SENT = "sent"
    #: The broker has not accepted the message (``Basic.Nack``). If there are several queues, some may have accepted it.
    NACKED = "nacked"
    #: The message was mandatory, and no queue has received it (``Basic.Return``).
    RETURNED = "returned"
    #: The broker has closed the channel because of the message.
    REJECTED = "rejected"
    #: The message was never written.
    FAILED = "failed"
    #: At least a part was written. Before the answer, the connection or channel ended, or `delivery_timeout` passed.
    #: In a forked child, all unsettled messages get this outcome, because only the parent gets the answers. A copy or
    #: pickle of an unsettled receipt has this outcome, because only the original gets the answer.
    UNKNOWN = "unknown"
    #: The message is still in the outbox, because its producer was closed, or did not deliver the message
    #: (``outbox_keep_undelivered``). The next producer with this outbox sends it, unless it is damaged or too old.
    STORED = "stored"


#: The outcomes of messages that may be missing in the broker, and are not in an outbox either.
UNDELIVERED = (Outcome.NACKED, Outcome.RETURNED, Outcome.REJECTED, Outcome.FAILED, Outcome.UNKNOWN)


class Receipt:
    """The state and outcome of one admitted message. The subclasses for each kind of producer add methods that wait."""

    # Each message has a receipt. So receipts are small: they refer to existing objects, and compute values on access.
    __slots__ = (
        "_id_prefix",
        "_kept_as",
        "_number",
        "_outcome",
        "_payload",
        "_prepared",
        "_reply",
        "_route",
        "_seen",
        "_tag",
        "_waiter",
    )

    # The actual outcome of an undelivered message whose `_outcome` is *stored*. Not set for other messages.
    _kept_as: Outcome

    def __init__(self, payload: bytes | Message, route: Route, id_prefix: str | None) -> None:
        # The payload that the application has passed. If it is only a body, the message is persistent.
        self._payload = payload
        self._route = route
        # First part of the message ids that the producer assigns; ``None`` if it assigns none.
        self._id_prefix = id_prefix
        # The message's number in the order of admission. Before the admission, 0 or (if spilled) its number on disk.
        self._number = 0
        # The delivery tag with which the message was last sent; 0 if it has not been sent.
        self._tag = 0
        # The outcome; ``None`` while the message is unsettled.
        self._outcome: Outcome | None = None
        # The code and text of the broker's ``Basic.Return`` or ``Channel.Close``. For any other reason of a failure,
        # such as a lost connection: 0 or `COSTS_CONNECTION`, and a text for people.
        self._reply: tuple[int, str] | None = None
        # Whether the application has seen a failure, so that `flush` and `close` do not report it.
        self._seen = False
        # Encoded properties (`PublishEncoder.prepare`); ``None`` for the first copy of a plain message (`Admission`).
        self._prepared: Prepared | None = None
        # The object with which the producer wakes a caller that waits for the outcome; ``None`` if no caller waits.
        self._waiter: Any = None

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        _, slots = cast("tuple[None, dict[str, Any]]", super().__getstate__())
        # A waiter belongs to this process and to this receipt, so a copy has none.
        slots["_waiter"] = None
        if slots["_outcome"] is None:
            # Otherwise a wait for the outcome of the copy would never end.
            slots["_outcome"] = Outcome.UNKNOWN
            slots["_reply"] = (0, "only the original of this copied receipt gets the broker's answer")
        return None, slots

    @property
    def outcome(self) -> Outcome | None:
        """The outcome; ``None`` while the message is unsettled. Reading a failure marks it as seen, see `error`."""
        self._look()
        return self._outcome

    @property
    def done(self) -> bool:
        """Whether the message is settled."""
        return self._outcome is not None

    @property
    def delivered(self) -> bool:
        """Whether the message is confirmed or, without confirms, sent. Reading a failure marks it as seen."""
        self._look()
        return not self._failed and self._outcome is not None

    @property
    def is_stored(self) -> bool:
        """Whether the message stays in the outbox for the next producer."""
        return self._outcome is Outcome.STORED

    @property
    def failure(self) -> Outcome | None:
        """The outcome of a message that was not delivered, even if the message stays in the outbox.

        ``None`` if the message is unsettled or delivered, or stays in the outbox only because its producer was closed.
        Reading a failure marks it as seen, see `error`.
        """
        self._look()
        return self._outcome if self._outcome in UNDELIVERED else self._undelivered

    @property
    def _undelivered(self) -> Outcome | None:
        return getattr(self, "_kept_as", None)

    @property
    def may_have_arrived(self) -> bool:
        """Whether a copy of the message may be in the broker.

        The outcome is that of the last copy. An earlier copy may have arrived if the message was sent again.
        """
        return self._outcome not in (Outcome.RETURNED, Outcome.REJECTED, Outcome.FAILED) or self._is_second_copy

    @property
    def costs_connection(self) -> bool:
        """Whether the producer no longer sends the message, because connections were lost when it was sent.

        The outcome of such a message is *unknown*, or *stored* with an outbox.
        """
        return self._reply is not None and self._reply[0] == COSTS_CONNECTION

    @property
    def _is_second_copy(self) -> bool:
        return self._prepared is not None and _MARK in self._prepared[1]

    @property
    def _failed(self) -> bool:
        return self._outcome not in (None, Outcome.CONFIRMED, Outcome.SENT)

    def _look(self) -> None:
        if self._failed:
            self._seen = True

    @property
    def exchange(self) -> str:
        """The exchange of the message."""
        return self._route.exchange

    @property
    def routing_key(self) -> str:
        """The routing key of the message."""
        return self._route.routing_key

    @property
    def message_id(self) -> str | None:
        """The message id on the wire; ``None`` if neither the application nor the producer assigns one."""
        payload = self._payload
        if isinstance(payload, Message) and payload.message_id is not None:
            return payload.message_id
        return None if self._id_prefix is None else f"{self._id_prefix}{self._number:012x}"

    @property
    def message(self) -> RoutedMessage:
        """A copy of the message, with the attribute `message_id` of this receipt as its id.

        ``producer.send(receipt.message)`` sends the message again, to the same exchange and routing key.
        """
        return RoutedMessage.copy_of(self._as_published(), self.exchange, self.routing_key)

    def _as_published(self) -> Message:
        payload = self._payload
        if not isinstance(payload, Message):
            return Message(payload, message_id=self.message_id)
        if payload.message_id is not None or self._id_prefix is None:
            return payload
        values = {name: getattr(payload, name) for name in Message.__dataclass_fields__}
        return Message(**(values | {"message_id": self.message_id}))

    @property
    def size(self) -> int:
        """The length of the body in bytes."""
        payload = self._payload
        return len(payload.body if isinstance(payload, Message) else payload)

    @property
    def held_bytes(self) -> int:
        """Approximate bytes of memory of the receipt and its message."""
        return self.size + RECEIPT_OVERHEAD

    def error(self) -> DeliveryError | None:
        """The error for the outcome; ``None`` if the message was delivered or is unsettled.

        The call marks the failure as seen, so `flush` and `close` do not report it any more.
        """
        if not self._failed:
            return None
        self._seen = True
        text = self.describe()
        code, words = self._reply or (0, "")
        match self._outcome:
            case Outcome.NACKED:
                return MessageNacked(text, self)
            case Outcome.RETURNED:
                return MessageReturned(f"{text}{self._way_out(code)}", self, code, words)
            case Outcome.REJECTED:
                return MessageRejected(f"{text}{self._way_out(code)}", self, code, words)
            case Outcome.FAILED:
                return MessageFailed(text, self)
            case Outcome.STORED:
                return MessageStored(f"{text}{self._way_out(code)}", self)
        return OutcomeUnknown(text, self)

    def _way_out(self, code: int) -> str:
        if code == _NOT_FOUND and self.exchange:
            return "; declare the exchange first"
        if code != _NO_ROUTE:
            return ""
        if self.exchange:
            missing = f"no queue is bound to exchange {self.exchange!r} for it: bind one"
        elif self.routing_key:
            missing = f"there is no queue {self.routing_key!r}: declare it"
        else:
            missing = "routing_key is empty: set it to the name of a queue"
        return f"; {missing}, or set mandatory=False to have the broker drop such messages"

    def _verdict(self) -> Outcome:
        if self._outcome is not Outcome.CONFIRMED:
            error = self.error()
            if error is not None:
                raise error
        assert self._outcome is not None
        return self._outcome

    def _unanswered(self, timeout: float) -> ConfirmTimeout:
        return ConfirmTimeout(f"no answer from the broker within {timeout:.3g} s for {self.describe()}")

    def describe(self) -> str:
        """Return a text of one line with the message and its outcome."""
        text = f"message {self.message_id or self._number} to {self.exchange!r}/{self.routing_key!r}: " + (
            self._outcome or "unsettled"
        )
        if self._reply is None:
            return text
        code, words = self._reply
        return f"{text} ({code} {words})" if code > 0 else f"{text} ({words})"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.describe()}>"
