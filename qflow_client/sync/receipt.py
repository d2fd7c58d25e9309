"""The receipts of a `Producer`. Threads can wait for their outcome."""

from __future__ import annotations

import threading

from qflow_client.forks import after_fork_in_child
from qflow_client.guard import check_can_wait
from qflow_client.receipt import Outcome, Receipt
from qflow_client.settings import check_timeout
from qflow_client.sync.latch import Latch

__all__ = ["SyncReceipt"]

# Guards the creation of latches. It is held only for a moment, so one lock for all receipts is enough. It is reentrant,
# because a finalizer may wait for a receipt at that moment.
_making = threading.RLock()


def _after_fork_in_child() -> None:
    # Another thread of the parent may have held the lock. The child does not have this thread.
    global _making
    _making = threading.RLock()


after_fork_in_child(_after_fork_in_child)


class SyncReceipt(Receipt):
    """The receipt of one message that a `Producer` sent."""

    __slots__ = ()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the message is settled.

        Args:
            timeout: seconds; ``None`` for no limit.

        Returns:
            True if the message is settled; False after the timeout.

        Raises:
            TypeError, ValueError: `timeout` is not a number.
        """
        if timeout is not None:
            check_timeout(timeout)
        if self._outcome is None:
            check_can_wait("a wait for a receipt")
            with _making:
                latch = Latch()
                if self._waiter is None:
                    self._waiter = latch
            # The thread that settles the receipt sets the outcome, and then sets the latch, if there is one. So if
            # there is no outcome here, the latch will be set.
            if self._outcome is None:
                self._waiter.wait(timeout)
        return self._outcome is not None

    def result(self, timeout: float | None = None) -> Outcome:
        """Wait for the outcome.

        Args:
            timeout: seconds; ``None`` for no limit.

        Returns:
            `Outcome.CONFIRMED`, or `Outcome.SENT` in a producer without confirms.

        Raises:
            ConfirmTimeout: the message is not settled yet. It may still be settled later.
            DeliveryError: the message has another outcome; each outcome has its own subclass.
            TypeError, ValueError: `timeout` is not a number.
        """
        if not self.wait(timeout):
            assert timeout is not None
            raise self._unanswered(timeout)
        return self._verdict()
