"""`SyncReceipt` is the class of a `Producer`'s receipts. Threads can wait for the outcome of a message."""

from __future__ import annotations

from qflow_client.forks import after_fork_in_child
from qflow_client.guard import check_can_wait
from qflow_client.locks import RLock
from qflow_client.receipt import Outcome, Receipt
from qflow_client.settings import check_timeout
from qflow_client.sync.latch import Latch

__all__ = ["SyncReceipt"]

# Guards the creation of latches. Reentrant, because a finalizer may interrupt this thread and wait for a receipt.
_making = RLock()


def _after_fork_in_child() -> None:
    # Another thread of the parent may have locked the lock. No thread of the child would release it.
    global _making
    _making = RLock()


after_fork_in_child(_after_fork_in_child)


class SyncReceipt(Receipt):
    """The receipt of one message of a `Producer`, for threads that wait for the outcome."""

    __slots__ = ()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the message is settled.

        Args:
            timeout: the longest wait in seconds; ``None`` for no limit.

        Returns:
            True if the message is settled; False after the timeout.

        Raises:
            NestedCall: called where a wait might never end, for example in a finalizer (E2).
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
            # The thread that settles the receipt sets the outcome first, and then the latch. So if there is no outcome
            # yet, that thread will set this latch.
            if self._outcome is None:
                self._waiter.wait(timeout)
        return self._outcome is not None

    def result(self, timeout: float | None = None) -> Outcome:
        """Wait for the outcome.

        Args:
            timeout: the longest wait in seconds; ``None`` for no limit.

        Returns:
            `Outcome.CONFIRMED`, or `Outcome.SENT` in a producer without confirms.

        Raises:
            ConfirmTimeout: the message is not settled yet, but may still be settled later.
            DeliveryError: the message has another outcome; each outcome has its own subclass of this error.
            NestedCall, TypeError, ValueError: as for `wait`.
        """
        if not self.wait(timeout):
            assert timeout is not None
            raise self._unanswered(timeout)
        return self._verdict()
