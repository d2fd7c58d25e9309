"""Finds the message that a ``Basic.Return`` refers to.

A return has no delivery tag, so the message is found by its message id, exchange and routing key. An id that the
producer has assigned contains the message's number.
"""

from __future__ import annotations

from collections.abc import Iterable

from qflow_client.core.resending import Resending
from qflow_client.core.unconfirmed import Unconfirmed
from qflow_client.message import Message
from qflow_client.receipt import Receipt

__all__ = ["Returns"]


class Returns:
    """Finds the unsettled mandatory message that a return refers to."""

    __slots__ = ("_id_prefix", "_is_mandatory", "_resending", "_unconfirmed", "by_id")

    def __init__(
        self, is_mandatory: bool, id_prefix: str | None, unconfirmed: Unconfirmed, resending: Resending
    ) -> None:
        self._is_mandatory = is_mandatory
        self._id_prefix = id_prefix
        self._unconfirmed = unconfirmed
        self._resending = resending
        #: The unsettled mandatory messages with ids that the application has assigned, by id.
        self.by_id: dict[str, list[Receipt]] = {}

    def has_own_id(self, payload: bytes | Message) -> bool:
        """Whether a message can be returned, and has an id that the application has assigned."""
        return self._is_mandatory and isinstance(payload, Message) and payload.message_id is not None

    def expect(self, receipt: Receipt) -> None:
        """Record a message that will be admitted next."""
        if self.has_own_id(receipt._payload):
            self.by_id.setdefault(receipt._payload.message_id, []).append(receipt)  # type: ignore[union-attr, arg-type]  # it has

    def forget(self, receipts: Iterable[Receipt]) -> None:
        for receipt in receipts:
            payload = receipt._payload
            if isinstance(payload, Message) and payload.message_id in self.by_id:
                own = self.by_id[payload.message_id]
                if receipt in own:
                    own.remove(receipt)
                if not own:
                    del self.by_id[payload.message_id]

    def heal(self) -> None:
        """Forget messages that are settled, or that were not admitted because of an interrupt."""
        for message_id, own in tuple(self.by_id.items()):
            own[:] = [receipt for receipt in own if receipt._number and receipt._outcome is None]
            if not own:
                del self.by_id[message_id]

    def take(self, message_id: str | None, exchange: str, routing_key: str) -> Receipt | None:
        """Return the message that a return refers to, if it is written and unsettled; otherwise ``None``."""
        if message_id is None:
            return None
        # Skip messages with a reply, because they were already returned.
        own = [each for each in self.by_id.get(message_id, ()) if each._reply is None and self._is_written(each)]
        if own:
            # Several messages may have this id. Prefer a message with the exchange and routing key of the return.
            there = [each for each in own if (each.exchange, each.routing_key) == (exchange, routing_key)]
            return (there or own)[0]
        return self._with_given_id(message_id)

    def _with_given_id(self, message_id: str) -> Receipt | None:
        prefix = self._id_prefix
        if prefix is None or not message_id.startswith(prefix):
            return None
        try:
            number = int(message_id[len(prefix) :], 16)
        except ValueError:
            return None
        found = self._unconfirmed.with_number(number)
        if found is None:
            # Broker-J nacks an unroutable message before it returns the message, so it may be in `Resending.again`.
            found = next((each for each in self._resending.again if each._number == number), None)
        elif not self._is_written(found):
            return None
        return found if found is not None and found.message_id == message_id else None

    def _is_written(self, receipt: Receipt) -> bool:
        """Whether an unsettled message is completely written, or was written earlier and waits to be sent again."""
        tag = self._unconfirmed.tag_of(receipt)
        if not tag:
            return receipt._number in self._resending.written_before
        return tag <= self._unconfirmed.outbound.finished
