"""The registry of what flows in a process: to see it whole and to stop and start it by hand (F1 F5 F6 D5)."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

__all__ = ["FlowManager", "FlowResource"]


class FlowResource(Protocol):
    """What a manager can stop and start.

    It must be hashable and weakly referable. A manager calls `hold` and `lift` under its own lock, so neither may raise
    or wait for a thread that calls the manager.
    """

    @property
    def name(self) -> str:
        """For people; need not be unique."""

    def hold(self, kind: str, *, source: str, detail: str) -> None:
        """Raise a hold on the resource's gate."""

    def lift(self, kind: str, *, source: str) -> None:
        """Lift it again."""


class FlowManager:
    """Knows every resource that registered and is still alive. Thread-safe.

    It keeps no resource alive, and what registers after `stop_all` is stopped at once.
    """

    #: The kind of the hold that `stop_all` raises.
    HOLD = "paused"

    def __init__(self, name: str = "manager") -> None:
        self.name = name
        # Reentrant, because the collector can run a resource's finalizer, which unregisters it, at any point in here.
        self._lock = threading.RLock()
        self._resources: weakref.WeakSet[FlowResource] = weakref.WeakSet()
        # Why everything is stopped; None while it is not.
        self._stopped: str | None = None

    @property
    def resources(self) -> tuple[FlowResource, ...]:
        """What is registered now, in no order."""
        with self._lock:
            return tuple(self._resources)

    @property
    def is_stopped(self) -> bool:
        """Whether `stop_all` is in force."""
        return self._stopped is not None

    def register(self, resource: FlowResource) -> None:
        """Take a resource into the registry, and stop it if everything is stopped."""
        with self._lock:
            self._resources.add(resource)
            stopped = self._stopped
            if stopped is not None:
                resource.hold(self.HOLD, source=self.name, detail=stopped)

    def unregister(self, resource: FlowResource) -> None:
        """Forget a resource; one that is not registered is no error."""
        with self._lock:
            self._resources.discard(resource)

    def stop_all(self, reason: str = "") -> int:
        """Stop all producers (D5): raise a hold on every resource, and on those that come later.

        Args:
            reason: for people; it is the detail of the hold.

        Returns:
            How many resources there are.
        """
        with self._lock:
            self._stopped = reason
            for resource in tuple(self._resources):
                resource.hold(self.HOLD, source=self.name, detail=reason)
            return len(self._resources)

    def start_all(self) -> int:
        """Start all producers (D5): lift the hold that `stop_all` raised, and no other.

        Returns:
            How many resources there are.
        """
        with self._lock:
            self._stopped = None
            for resource in tuple(self._resources):
                resource.lift(self.HOLD, source=self.name)
            return len(self._resources)
