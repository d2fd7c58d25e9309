"""Admits messages. An admitted message has a number, and a receipt that will be settled.

Producers and drop-ins call `send_at_once`, and then `send` if the first call admits nothing. If a message cannot be
admitted now, it waits in line, and `SendLine` admits it later. Admission increments `next_number` and appends the
message to `unsent`. If an interrupt comes earlier, the message is not admitted, and `heal` undoes the
preparations. The windows and the rate (see `limits`), the holds of the gate, and the unwritten bytes limit admission.

`send_at_once` admits nearly every message if there is no outbox, observer, rate or limit of bytes. It takes no lock and
is not a step (see `core.step`). The limits that it checks are plain attributes, so it calls no function between its
first check and its last assignment. CPython runs no other thread, signal handler or finalizer between two instructions
that call no function. Other interpreters (PyPy, builds without the GIL) and tracers may run other code in between. If
`is_undisturbed` is False when the producer is made, `send_at_once` admits nothing.

The *cost* of a message is the size of its frames. A *plain* message has no properties of its own, and a body of at
least one byte that fits into one frame. The cost of a plain message is the length of its body plus `Route.cost`. For
other messages the encoder computes the cost.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType, MethodType

from qflow_client.amqp.frames import PublishEncoder, Route
from qflow_client.core.limits import Limits
from qflow_client.core.reporting import MessageObserver
from qflow_client.core.returns import Returns
from qflow_client.core.step import Steps, step
from qflow_client.core.store import Store
from qflow_client.errors import ProducerClosed
from qflow_client.events import HoldKind
from qflow_client.message import Message, republished
from qflow_client.receipt import Receipt
from qflow_client.settings import ProducerSettings

__all__ = ["Admission", "is_undisturbed"]


def is_undisturbed() -> bool:
    """Whether no other code runs between two instructions that call no function.

    In CPython with its GIL, only a trace or profile function in Python, or a tool of `sys.monitoring`, may run there.
    During its run, CPython may switch to another thread.
    """
    if sys.implementation.name != "cpython" or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return False
    monitoring = getattr(sys, "monitoring", None)
    return not (
        any(isinstance(hook, (FunctionType, MethodType)) for hook in (sys.gettrace(), sys.getprofile()))
        or (monitoring is not None and any(map(monitoring.get_tool, range(6))))
    )


class Admission:
    """Moves messages from the application to `unsent`, where they wait for the socket."""

    # In CPython 3.11, an object without slots is slower if it has more than 30 attributes.
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

    #: Encodes messages for the open channel; set by `use_encoder`.
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
        self.limits = limits
        #: The same object as `limits.window`. This attribute saves time, because every message uses it.
        self.window = limits.window
        self._controller = limits.controller
        self.gate = limits.controller.gate
        self._returns = returns
        self.steps = steps
        # Whether `send_at_once` can admit messages: no store, no limit besides the window, and `is_undisturbed()`.
        self._is_simple = limits.is_plain and is_undisturbed()
        #: True while `SendLine` admits waiting messages, so that no new message overtakes them.
        self.is_granting = False
        self._max_unwritten = settings.max_unwritten_bytes
        #: The prefix of message ids that the producer assigns; ``None`` if the producer assigns no ids.
        self.id_prefix = id_prefix
        self.receipt_type = receipt_type
        #: The number of the next admitted message. A message id that the producer assigns is `id_prefix` and this
        #: number in hexadecimal digits.
        self.next_number = 1
        #: Admitted messages that were never written and have no frames, in the order of admission.
        self.unsent: deque[Receipt] = deque()
        #: How many bytes of messages and control frames are not written yet.
        self.unwritten = 0
        #: Why nothing can be admitted any more; ``None`` while messages can be admitted.
        self.closed: str | None = None
        #: Stores admitted messages; ``None`` without an outbox.
        self.store: Store | None = None
        #: Measures or traces every message; ``None`` without metrics and tracing.
        self.observer: MessageObserver | None = None

    def use_encoder(self, encoder: PublishEncoder, exchange: str, routing_key: str) -> None:
        """Encode later messages with `encoder`. Most messages have this exchange and routing key."""
        self.encoder = encoder
        self._mark = encoder.mark
        # The longest body of a plain message. The frames of plain messages always contain an id. So without message
        # ids, no message counts as plain (-1).
        self._max_plain = -1 if self.id_prefix is None else encoder.max_body
        # The exchange and routing key that were last passed to `route`, and their route. The next message usually has
        # the same exchange and routing key.
        self._last = exchange, routing_key, encoder.route(exchange, routing_key)

    def use_store(self, store: Store) -> None:
        """Keep all messages in a store, from the first admission on. So `send_at_once` admits nothing."""
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
        """Admit a message in the usual case: there is room, no hold, no waiting message, and no limit but the window.

        Any thread may call this method, even while a step runs (E2). If it returns ``None``, nothing was admitted, and
        the caller must call `send` instead.

        Raises:
            TypeError, ValueError: the message cannot be encoded.
        """
        last = self._last
        if exchange is last[0] and routing_key is last[1]:
            route = last[2]
        else:
            route = self.route(exchange, routing_key)
        receipt = self.receipt_type(payload, route, self.id_prefix)
        if type(payload) is bytes and 0 < (size := len(payload)) <= self._max_plain:
            # Add here as `cost` does, because a call would take longer than the addition.
            cost = route.cost + size
        else:
            cost = self.prepare(receipt)
            if self._returns.has_own_id(payload):
                return None
        window = self.window
        # No function is called from here to `append`, so nothing interrupts the admission.
        if (
            window.used < window._capacity
            and self._is_simple
            and self.gate.is_open
            and not self._controller.waiting
            and not self.is_granting
            and self.observer is None
            and self.unwritten + cost <= self._max_unwritten
            # False if the route was made for an earlier channel.
            and route.made_by is self._mark
        ):
            number = receipt._number = self.next_number
            window.used, self.next_number, self.unwritten = window.used + 1, number + 1, self.unwritten + cost
            self.unsent.append(receipt)
            return receipt
        return None

    def send(self, payload: bytes | Message, exchange: str, routing_key: str, now: float) -> Receipt | None:
        """Admit a message, or return ``None`` if the producer is blocked (flowed) or other messages wait.

        Raises:
            ProducerClosed: no message can be admitted any more.
            TypeError, ValueError: the message cannot be encoded.
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
        # Shut the gate too, because `send_at_once` checks the gate and not `closed`.
        self.gate.shut()
        if self.closed is None:
            self.closed = reason

    # Admitting.

    def admit(self, receipt: Receipt, cost: int, since: float, now: float) -> None:
        """Admit a message. The caller has checked the limits, and has counted the message against them.

        Args:
            cost: the size of the message's frames in bytes.
            since: when the message began to wait, in seconds; `now` if it did not wait.
        """
        if self.store is not None:
            self.store.admitting(receipt, self.next_number)
        self._returns.expect(receipt)
        if self.observer is not None:
            self.observer.began[self.next_number] = since
        # No function is called from here to `append`, as in `send_at_once`.
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
        """Return the open channel's route for an exchange and a routing key.

        Raises:
            TypeError, ValueError: the exchange or the routing key cannot be encoded.
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
            TypeError, ValueError: the properties cannot be encoded.
        """
        payload = receipt._payload
        if type(payload) is bytes and 0 < (size := len(payload)) <= self._max_plain:
            receipt._prepared = None
            # Add here as `cost` does, because a call would take longer than the addition.
            return receipt._route.cost + size
        message = payload if isinstance(payload, Message) else Message(payload)
        prepared = receipt._prepared = self.encoder.prepare(message, has_id=self.id_prefix is not None)
        return self.encoder.cost(receipt._route, len(message.body), prepared)

    def prepare_again(self, receipt: Receipt) -> None:
        """Encode a second copy's properties, with the first copy's message id. The errors are those of `prepare`."""
        receipt._prepared = self.encoder.prepare(republished(receipt._as_published()), has_id=False)

    def cost(self, receipt: Receipt) -> int:
        """Return the size of the frames of an admitted message, in bytes."""
        route, size, prepared = receipt._route, receipt.size, receipt._prepared
        return route.cost + size if prepared is None else self.encoder.cost(route, size, prepared)

    # Unwritten bytes.

    @property
    def is_nearly_written(self) -> bool:
        """Whether `unwritten` is at most half of its limit. If so, the hold ``transport`` can be lifted."""
        return self.unwritten <= self._max_unwritten // 2

    def count_unwritten(
        self, others: Callable[[], Iterable[Receipt]], written_to: Callable[[], int], now: float
    ) -> None:
        """Recount the unwritten bytes, and raise or lift the hold ``transport`` if necessary.

        Args:
            others: function that returns the messages to be sent again.
            written_to: function that returns how many bytes of the frames are not written yet.
        """
        while True:
            before = self.unwritten
            size = written_to() + sum(map(self.cost, (*others(), *self.unsent)))
            # If another thread has admitted messages meanwhile, count again. No thread switch comes between this check
            # and the assignment.
            if before == self.unwritten:
                self.unwritten = size
                break
        if size > self._max_unwritten:
            self.gate.hold(HoldKind.TRANSPORT, now=now)
        elif self.is_nearly_written:
            self.gate.lift(HoldKind.TRANSPORT, now=now)

    def heal(self, unsettled: Callable[[], Sequence[Receipt]]) -> None:
        """Repair the state after an unfinished step. `unsettled` returns the receipts of the unsettled messages."""
        if self.observer is not None:
            self.observer.began.pop(self.next_number, None)
        self._returns.heal()
        receipts = self.limits.heal(unsettled)
        if self.store is not None:
            self.store.heal(receipts)
        self.gate.heal()
