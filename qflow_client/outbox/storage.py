"""What a producer with an outbox has besides: its outbox, the state that goes with it, and its thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from qflow_client.logs import log
from qflow_client.outbox.errors import OutboxError
from qflow_client.outbox.outbox import Outbox
from qflow_client.outbox.store import StoringProtocol
from qflow_client.outbox.writer import Keeper, StoringStep
from qflow_client.receipt import Receipt
from qflow_client.settings import ProducerSettings

__all__ = ["Storage"]


class Storage:
    """The outbox of a producer, the state that goes with it, and its thread; to be opened.

    It is made before there is anything to close, so that whoever is interrupted while it is opened has what to close.

    Args:
        settings: the producer's settings.
    """

    #: Set by `open`.
    outbox: Outbox
    protocol: StoringProtocol
    keeper: Keeper

    def __init__(self, settings: ProducerSettings) -> None:
        self._settings = settings
        # Guards the two below: it may be closed while another thread opens it.
        self._lock = threading.Lock()
        self._is_closed = False
        self._opened: Outbox | None = None

    def open(
        self,
        take: Callable[[StoringStep], None],
        committed: Callable[[int, Exception | None], None] | None = None,
        **options: Any,
    ) -> None:
        """Open the outbox; on any thread, once.

        Args:
            take: has a step of the protocol taken where such steps are taken.
            committed: as for `Keeper`.
            options: as for `StoringProtocol`.

        Raises:
            OutboxInUse, OutboxError: as `Outbox`; or it was closed meanwhile.
        """
        settings = self._settings
        assert settings.outbox is not None
        outbox = Outbox(settings.outbox, max_bytes=settings.outbox_max_bytes, synchronous=settings.outbox_synchronous)
        with self._lock:
            self._opened = outbox
            is_closed = self._is_closed
        if is_closed:
            outbox.close()
            raise OutboxError(f"{outbox.path}: its producer was closed")
        self.outbox = outbox
        self.protocol = StoringProtocol(settings, outbox=outbox, **options)
        self.keeper = Keeper(outbox, self.protocol, take, committed)

    def __len__(self) -> int:
        return 0 if self._opened is None else self._opened.left

    @property
    def spilled(self) -> tuple[Receipt, ...]:
        """The receipts of what waits on disk, as far as anybody has them."""
        return tuple(self.protocol._spilled.values())

    def start(self) -> None:
        """Begin with what was left."""
        self.keeper.start()

    def wait_durable(self, receipt: Receipt) -> None:
        """Return when all that was put until now is on disk.

        Args:
            receipt: of the last of it.

        Raises:
            OutboxError: it could not be written; the error has the receipt.
        """
        try:
            self.outbox.wait_durable(self.outbox.last)
        except OutboxError as error:
            error.receipt = receipt
            raise

    def close(self, timeout: float) -> None:
        """Commit, and let others have the outbox; also before it is opened, and again.

        Args:
            timeout: seconds that what goes on may take to end.
        """
        with self._lock:
            self._is_closed = True
            outbox = self._opened
        if outbox is None:
            return
        try:
            if hasattr(self, "keeper"):
                self.keeper.stop(timeout)
        finally:
            try:
                outbox.close()
            except OutboxError as error:
                # What is settled and stays in the file is sent once more, and marked.
                log(logging.ERROR, "%s: %s", self._settings.name, error)
