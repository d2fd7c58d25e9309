"""The line of messages that wait to be admitted.

If a message cannot be admitted immediately, `calls.send` puts a `SendTicket` into the line of the flow controller.
`grant` admits the waiting messages in the order of the line, when the gate and the limits allow it. A ticket is
*decided* when it gets a receipt with a number, gets an error, or is cancelled. Then its waiter is added to
`Reports.wake`, except after a withdrawal by `give_up` or `look_at`. `look_at` withdraws expired tickets (A4).
"""

from __future__ import annotations

import math
from typing import Any

from qflow_client.amqp.frames import properties
from qflow_client.core.admission import Admission
from qflow_client.core.reporting import Reports
from qflow_client.core.step import Steps, step
from qflow_client.core.store import Store
from qflow_client.core.tickets import SendTicket
from qflow_client.core.unreported import ON_DELIVERY
from qflow_client.core.waiters import Waiters
from qflow_client.errors import FlowControlTimeout, ProducerClosed
from qflow_client.events import HoldKind
from qflow_client.flow import FlowController, Hold
from qflow_client.message import Message

__all__ = ["SendLine"]

# The holds that the windows and the rate raise. `Store.spill_line` updates the hold ``outbox``.
_LIMITS = (HoldKind.CAPACITY, HoldKind.RATE)


class SendLine:
    """The waiting messages of one producer. Notices about them are at least `notice_period` seconds apart."""

    __slots__ = (
        "_admission",
        "_controller",
        "_gate",
        "_notice_at",
        "_notice_period",
        "_reports",
        "_waiters",
        "flowed_errors",
        "steps",
        "tickets",
    )

    def __init__(
        self,
        admission: Admission,
        controller: FlowController,
        reports: Reports,
        waiters: Waiters,
        steps: Steps,
        notice_period: float,
    ) -> None:
        self._admission = admission
        self._controller, self._gate = controller, controller.gate
        self._reports = reports
        self._waiters = waiters
        self.steps = steps
        #: The tickets of the waiting messages, the longest wait first.
        self.tickets: dict[SendTicket, None] = {}
        # The earliest time of the next notice about waiting messages.
        self._notice_at = -math.inf
        self._notice_period = notice_period
        #: How many calls of `send` have failed, by the kind of their oldest hold; ``line`` if there was no hold.
        self.flowed_errors: dict[str, int] = {}

    # Waiting.

    def make_ticket(
        self,
        payload: bytes | Message,
        exchange: str,
        routing_key: str,
        now: float,
        *,
        timeout: float | None = None,
        waiter: Any = None,
        source: str = "",
        first: bool = False,
    ) -> SendTicket:
        """Make the ticket of a message that `Admission.send` did not admit. The ticket is not in line yet.

        Args:
            timeout: the longest wait in seconds; ``None`` for no limit.
            waiter: the object that wakes the sender. `Reports.wake` gets it when the ticket is decided.
            source: a name for the origin of the message, for a `Line` that treats origins differently (`WeightedLine`).
            first: whether the ticket goes to the front of the line. A `send` in a callback does this, because other
                senders may be waiting for the callback to return.

        Raises:
            ProducerClosed: no message can be admitted any more.
            TypeError, ValueError: the message cannot be encoded.
        """
        if self._admission.closed is not None:
            raise ProducerClosed(self._admission.closed, payload, exchange=exchange, routing_key=routing_key)
        # Encode names and properties here, so that invalid values raise an error before the wait, not after it.
        self._admission.encoder.route(exchange, routing_key)
        if isinstance(payload, Message):
            properties(payload.__dict__)
            size = len(payload.body)
        else:
            size = len(payload)
        ticket = SendTicket(payload, exchange, routing_key, size, now, source)
        ticket.first = first
        ticket.waiter = waiter
        ticket.notice_at = now + self._notice_period
        if timeout is not None:
            ticket.deadline = now + timeout
        return ticket

    @step
    def stand_in_line(self, ticket: SendTicket, now: float) -> None:
        """Put a ticket into the line. The ticket stays in the line until it is decided."""
        if self._admission.closed is not None:
            # The producer was closed after the ticket was made.
            ticket.error = ticket.closed_error(self._admission.closed)
            return
        self.tickets[ticket] = None
        if ticket.first:
            self._controller.stand_in_front(ticket, now, ignoring=ON_DELIVERY)
        else:
            self._controller.stand_in_line(ticket, now)
        # There may be room now, although there was none when `Admission.send` was called.
        self.grant(now)

    def look_at(self, ticket: SendTicket, now: float) -> float | None:
        """End the wait of a message if its deadline has passed. Log a notice if one is due.

        Returns:
            When to call again; ``None`` if the ticket is decided.

        Raises:
            FlowControlTimeout: the deadline has passed, and the message will not be sent.
        """
        decision = self._look_at(ticket, now)
        if isinstance(decision, FlowControlTimeout):
            raise decision
        return decision

    @step
    def _look_at(self, ticket: SendTicket, now: float) -> float | FlowControlTimeout | None:
        if now >= ticket.deadline and not ticket.decided:
            # The rate may allow the message now, even if nothing has called `grant`.
            self.grant(now)
        if ticket.decided:
            return None
        if now >= ticket.deadline:
            error = ticket.flowed_error(FlowControlTimeout, self.count_flowed_error(), now - ticket.since)
            self._withdraw(ticket, now)
            return error
        if now >= ticket.notice_at:
            self._notice(ticket, now)
        return min(ticket.deadline, ticket.notice_at)

    @step
    def notice(self, now: float) -> float | None:
        """Log a notice for waiting calls of `send` if one is due. Callers that do not poll `look_at` use this method.

        Return the time of the next call; ``None`` if no call of `send` waits.
        """
        ticket = next(iter(self.tickets), None)
        if ticket is None:
            return None
        if now >= ticket.notice_at:
            self._notice(ticket, now)
        return ticket.notice_at

    def _notice(self, ticket: SendTicket, now: float) -> None:
        # One notice covers all waiting calls of `send`, so another ticket's call of `look_at` may have logged it.
        if now >= self._notice_at:
            self._notice_at = now + self._notice_period
            self._reports.report_waiting(len(self.tickets), next(iter(self.tickets)).since, now)
        ticket.notice_at = self._notice_at

    def count_flowed_error(self) -> tuple[Hold, ...]:
        """Count a call of `send` that fails because it may not wait longer. Return the present holds."""
        holds = self._gate.holds
        # Without a hold, the message waits only because other messages are before it in the line.
        kind = holds[0].kind if holds else "line"
        self.flowed_errors[kind] = self.flowed_errors.get(kind, 0) + 1
        return self._reports.holds

    # Leaving the line.

    @step
    def give_up(self, ticket: SendTicket, now: float) -> bool:
        """Withdraw a waiting message. Return False if its ticket was already decided."""
        return self._withdraw(ticket, now)

    def _withdraw(self, ticket: SendTicket, now: float) -> bool:
        if ticket.decided:
            return False
        # Cancel the ticket, because `leave_line` does nothing if an interrupt has kept the ticket out of the line.
        ticket.cancelled = True
        self._controller.leave_line(ticket)
        self.tickets.pop(ticket, None)
        # The next message may be smaller, so there may be room for it.
        self.grant(now)
        return True

    @step
    def give_up_all(self, reason: str, now: float) -> None:
        """Withdraw all waiting messages together, because after a single withdrawal `grant` may admit the others.

        Args:
            reason: the text of the `ProducerClosed` error that the senders get.
        """
        self.close(reason)
        # No message waits any more, so `grant` lifts the holds of the windows and the rate if there is room.
        self.grant(now)

    def close(self, reason: str) -> None:
        """Do the same as `give_up_all`, but within the caller's step (see `core.step`) and without calling `grant`."""
        for ticket in self.tickets:
            ticket.error = ticket.closed_error(reason)
        self._leave()

    def end(self, reason: str) -> None:
        """Do the same as `close` at the end of the producer, and do not use the application's line any more."""
        self.close(reason)
        self._controller.release_line()

    def check_room(self, store: Store) -> None:
        """End the wait of messages for which a new store has no room. The senders get the error of the store."""
        for ticket in self.tickets:
            try:
                store.check_room(ticket.payload, ticket.exchange, ticket.routing_key)
            except Exception as error:
                ticket.error = error
        self._leave()

    def heal(self) -> None:
        self._leave()
        self._admission.is_granting = False

    def _leave(self) -> None:
        """Wake the senders of all decided tickets, and keep the other tickets in line."""
        self._reports.wake += [ticket.waiter for ticket in self.tickets if ticket.decided]
        self.tickets = {ticket: None for ticket in self.tickets if not ticket.decided}
        self._controller.set_line(self.tickets)

    # Admitting.

    def grant(self, now: float) -> None:
        """Admit the waiting messages that the gate and the limits allow now."""
        controller, store = self._controller, self._admission.store
        # New messages must not be admitted before the waiting messages.
        self._admission.is_granting = True
        if store is not None:
            store.admit_backlog(now)
        while (ticket := controller.grant(now)) is not None:
            assert isinstance(ticket, SendTicket)
            self._admit_ticket(ticket, now)
        if self._waiters.unflowed or (not controller.waiting and any(map(self._gate.is_held_by, _LIMITS))):
            # Lift outdated holds of the limits now, because calls of `wait_unflowed` wait for the end of all holds.
            controller.look(now)
        if store is not None:
            store.spill_line(now)
        self._admission.is_granting = False

    def _admit_ticket(self, ticket: SendTicket, now: float) -> None:
        try:
            receipt, cost = self._admission.make_receipt(ticket.payload, ticket.exchange, ticket.routing_key)
            is_given_up = not ticket.claim()
            if not is_given_up:
                ticket.receipt = receipt
                self._admission.admit(receipt, cost, ticket.since, now)
        except Exception as error:
            if ticket.receipt is not None and ticket.receipt._number:
                # The message is already admitted, so the error comes from a signal handler.
                raise
            # A channel that opened during the wait may accept only smaller frames. The sender gets the error.
            self._admission.limits.give_back(ticket.size)
            ticket.receipt, ticket.error = None, error
        else:
            if is_given_up:
                # The sender has withdrawn the message meanwhile, see `SendTicket.claim`.
                self._admission.limits.give_back(ticket.size)
                ticket.cancelled = True
        self._reports.wake.append(ticket.waiter)
        del self.tickets[ticket]
