"""Admits messages. An admitted message has a number, and a receipt that will be settled.

Admission is one operation: it increments `next_number` and appends the message to `unsent`, the messages that were
never written. It changes no shared state before that. Admission is limited by the window and the rate (`limits`), by
the holds on the gate, and by the unwritten bytes. A message that cannot be admitted now waits in line, see `sendline`.

`send_at_once` handles nearly every message. It takes no lock and is not a step. Between its first check of the limits,
which are plain attributes, and its last assignment, it calls nothing. CPython runs no other thread, signal handler or
finalizer between two instructions that call nothing. Other interpreters (PyPy, builds without the GIL) do not guarantee
this, so `send_at_once` admits nothing there.

A *plain* message is a body of bytes that fits into one frame. It has no properties of its own, so its frames have the
length of its body plus `Route.cost`. All other messages are encoded when they are admitted, and the encoder computes
their cost.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from qflow_client.amqp.frames import PublishEncoder, Route
from qflow_client.core.limits import Limits
from qflow_client.core.reporting import MessageObserver
from qflow_client.core.returns import Returns
from qflow_client.core.step import Steps, step
from qflow_client.core.store import Store
from qflow_client.errors import ProducerClosed
from qflow_client.events import HoldKind
from qflow_client.message import Message
from qflow_client.receipt import Receipt
from qflow_client.settings import ProducerSettings

__all__ = ["Admission", "is_undisturbed"]


def is_undisturbed() -> bool:
    """Whether no thread, signal or finalizer runs between instructions that call nothing: CPython with its GIL."""
    return sys.implementation.name == "cpython" and bool(getattr(sys, "_is_gil_enabled", lambda: True)())


class Admission:
    """Moves messages from the application to `unsent`, where they wait for the socket.

    Args:
        settings: the producer's settings.
        limits: what limits admission.
        returns: finds the messages that a return names.
        steps: whether the last step was completed.
        id_prefix: the prefix of message ids that the producer assigns; ``None`` if it assigns none.
        receipt_type: the class of the receipts.
    """

    # CPython (3.11) is fast with at most 30 attributes that have no slots.
    __slots__ = (
        "_controller",
        "_is_simple",
        "_last",
        "_mark",
        "_max_plain",
        "_max_unwritten",
        "_returns",
        "closed",
        "encoder",
        "gate",
        "id_prefix",
        "is_granting",
        "limits",
        "next_number",
        "observer",
        "receipt_type",
        "steps",
        "store",
        "unsent",
        "unwritten",
        "window",
    )

    #: Encodes for the open channel; set by `use_encoder`.
    encoder: PublishEncoder

    def __init__(
        self,
        settings: ProducerSettings,
        limits: Limits,
        returns: Returns,
        steps: Steps,
        *,
        id_prefix: str | None,
        receipt_type: type[Receipt],
    ) -> None:
        #: What limits admission.
        self.limits = limits
        #: The window of `limits`, here for speed.
        self.window = limits.window
        self._controller = limits.controller
        self.gate = limits.controller.gate
        self._returns = returns
        self.steps = steps
        # Whether `send_at_once` may admit: the only limit is a window of messages, and nothing can interrupt it.
        self._is_simple = limits.is_plain and is_undisturbed()
        #: Whether waiting messages are being admitted. A new message must not go before them.
        self.is_granting = False
        self._max_unwritten = settings.max_unwritten_bytes
        #: The prefix of message ids that the producer assigns; ``None`` if it assigns none.
        self.id_prefix = id_prefix
        #: The class of the receipts.
        self.receipt_type = receipt_type
        #: The number of the next message; prefix and number form its message id. Incrementing it admits a message.
        self.next_number = 1
        #: Admitted messages that were never written, in the order of admission.
        self.unsent: deque[Receipt] = deque()
        #: Unwritten bytes of messages and of replies on the channel.
        self.unwritten = 0
        #: Why nothing can be admitted any more; ``None`` while messages can be admitted.
        self.closed: str | None = None
        #: Stores admitted messages; ``None`` without an outbox.
        self.store: Store | None = None
        #: Measures or traces every message; ``None`` without metrics and tracing.
        self.observer: MessageObserver | None = None

    def use_encoder(self, encoder: PublishEncoder, exchange: str, routing_key: str) -> None:
        """Encode for another channel from now on.

        Args:
            encoder: of the channel.
            exchange: the default exchange of messages.
            routing_key: the default routing key.
        """
        self.encoder = encoder
        self._mark = encoder.mark
        # The longest body that is a plain message; -1 if there are none, because each message needs a message id of its
        # own.
        self._max_plain = -1 if self.id_prefix is None else encoder.max_body
        # The last route. An identity comparison is the cheapest way to find that the next message has the same route.
        self._last = exchange, routing_key, encoder.route(exchange, routing_key)

    def use_store(self, store: Store) -> None:
        """Keep messages in a store. Every admission is a step from now on. No message may have been admitted before."""
        self.store = store
        self._is_simple = False
        if store.limiter is not None:
            self.limits.add(store.limiter)

    @property
    def admitted(self) -> int:
        """How many messages were admitted so far."""
        return self.next_number - 1

    # Sending.

    def send_at_once(self, payload: bytes | Message, exchange: str, routing_key: str) -> Receipt | None:
        """Admit a message if the only limit is a window, and the window has room.

        This method needs no step: any thread may call it, also inside a step (E2).

        Returns:
            Its receipt; ``None`` if `send` has to decide. Nothing has changed then.

        Raises:
            TypeError, ValueError: it cannot be encoded.
        """
        last = self._last
        if exchange is last[0] and routing_key is last[1]:
            route = last[2]
        else:
            route = self.route(exchange, routing_key)
        receipt = self.receipt_type(payload, route, self.id_prefix)
        if type(payload) is bytes and 0 < (size := len(payload)) <= self._max_plain:
            # As in `cost`; a call takes longer than the addition.
            cost = route.cost + size
        else:
            cost = self.prepare(receipt)
            if self._returns.has_own_id(payload):
                return None
        window = self.window
        # Nothing is called from here on.
        if (
            window.used < window._capacity
            and self._is_simple
            and self.gate.is_open
            and not self._controller.waiting
            and not self.is_granting
            and self.observer is None
            and self.unwritten + cost <= self._max_unwritten
            # The route was made for the open channel.
            and route.made_by is self._mark
        ):
            number = receipt._number = self.next_number
            window.used, self.next_number, self.unwritten = window.used + 1, number + 1, self.unwritten + cost
            self.unsent.append(receipt)
            return receipt
        return None

    def send(self, payload: bytes | Message, exchange: str, routing_key: str, now: float) -> Receipt | None:
        """Admit a message if that is possible now.

        Returns:
            Its receipt; ``None`` if the producer is flowed or other messages wait. Nothing has changed then.

        Raises:
            ProducerClosed: no message will ever be admitted again.
            TypeError, ValueError: it cannot be encoded.
        """
        receipt, cost = self.make_receipt(payload, exchange, routing_key)
        if self._send(receipt, cost, now):
            return receipt
        if self.closed is not None:
            raise ProducerClosed(self.closed, payload, exchange=exchange, routing_key=routing_key)
        return None

    @step
    def _send(self, receipt: Receipt, cost: int, now: float) -> bool:
        if not self._controller.try_acquire(receipt.size, now):
            return False
        self.admit(receipt, cost, now, now)
        return True

    def close(self, reason: str) -> None:
        """Admit nothing from now on."""
        # With a closed gate, `send_at_once` does not have to check `closed`.
        self.gate.shut()
        if self.closed is None:
            self.closed = reason

    # Admitting.

    def admit(self, receipt: Receipt, cost: int, since: float, now: float) -> None:
        """Admit a message. The caller has checked the limits.

        Args:
            receipt: of the message.
            cost: bytes of its frames.
            since: when it began to wait, in seconds.
            now: seconds.
        """
        if self.store is not None:
            self.store.admitting(receipt, self.next_number)
        self._returns.expect(receipt)
        if self.observer is not None:
            self.observer.began[self.next_number] = since
        # Nothing is called from here on, as in `send_at_once`.
        number = receipt._number = self.next_number
        self.next_number, self.unwritten = number + 1, self.unwritten + cost
        self.unsent.append(receipt)
        if self.unwritten > self._max_unwritten:
            self.gate.hold(HoldKind.TRANSPORT, now=now)

    def make_receipt(self, payload: bytes | Message, exchange: str, routing_key: str) -> tuple[Receipt, int]:
        """Return a new receipt for a message, and the size of its frames in bytes."""
        receipt = self.receipt_type(payload, self.route(exchange, routing_key), self.id_prefix)
        return receipt, self.prepare(receipt)

    def route(self, exchange: str, routing_key: str) -> Route:
        """Return a route of the channel.

        Raises:
            TypeError, ValueError: it cannot be encoded.
        """
        last = self._last
        if exchange is last[0] and routing_key is last[1] and last[2].made_by is self._mark:
            return last[2]
        route = self.encoder.route(exchange, routing_key)
        self._last = exchange, routing_key, route
        return route

    def prepare(self, receipt: Receipt) -> int:
        """Encode the properties of a message that was never written, and return the size of its frames in bytes.

        Raises:
            TypeError, ValueError: they cannot be encoded.
        """
        payload = receipt._payload
        if type(payload) is bytes and 0 < (size := len(payload)) <= self._max_plain:
            receipt._prepared = None
            # As in `cost`; a call takes longer than the addition.
            return receipt._route.cost + size
        message = payload if isinstance(payload, Message) else Message(payload)
        prepared = receipt._prepared = self.encoder.prepare(message, has_id=self.id_prefix is not None)
        return self.encoder.cost(receipt._route, len(message.body), prepared)

    def cost(self, receipt: Receipt) -> int:
        """Return the size of the frames of an admitted message, in bytes."""
        route, size, prepared = receipt._route, receipt.size, receipt._prepared
        return route.cost + size if prepared is None else self.encoder.cost(route, size, prepared)

    # Unwritten bytes.

    @property
    def is_nearly_written(self) -> bool:
        """Whether at most half of the allowed unwritten bytes are unwritten."""
        return self.unwritten <= self._max_unwritten // 2

    def count_unwritten(
        self, others: Callable[[], Iterable[Receipt]], written_to: Callable[[], int], now: float
    ) -> None:
        """Recount the unwritten bytes, and raise or lift the hold of the socket accordingly.

        Args:
            others: returns the messages to be written that are not in `unsent`.
            written_to: returns how many bytes are encoded for the socket and not written.
            now: seconds.
        """
        while True:
            before = self.unwritten
            size = written_to() + sum(map(self.cost, (*others(), *self.unsent)))
            # Other threads may have admitted messages meanwhile. Nothing runs between this check and the assignment.
            if before == self.unwritten:
                self.unwritten = size
                break
        if size > self._max_unwritten:
            self.gate.hold(HoldKind.TRANSPORT, now=now)
        elif self.is_nearly_written:
            self.gate.lift(HoldKind.TRANSPORT, now=now)

    def heal(self, unsettled: Callable[[], Sequence[Receipt]]) -> None:
        """Repair the state after an unfinished step. `unsettled` returns the admitted messages that are not settled."""
        if self.observer is not None:
            self.observer.began.pop(self.next_number, None)
        self._returns.heal()
        receipts = self.limits.heal(unsettled)
        if self.store is not None:
            self.store.heal(receipts)
        self.gate.heal()
