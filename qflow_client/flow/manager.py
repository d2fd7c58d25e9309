"""The registry of what flows in a process: to see it whole and to stop and start it by hand (F1 F5 F6 D5)."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Protocol

__all__ = ["FlowManager", "FlowResource"]


class FlowResource(Protocol):
    """What a manager can stop and start.

    It must be hashable and weakly referable. A manager calls `hold` and `lift` under its own lock, so neither may wait
    for a thread that calls the manager.
    """

    @property
    def name(self) -> str:
        """For people; need not be unique."""

    def hold(self, kind: str, *, source: str, detail: str) -> None:
        """Raise a hold on the resource's gate.

        Args:
            kind: why, as one word.
            source: who raises it.
            detail: for people to read.
        """

    def lift(self, kind: str, *, source: str) -> None:
        """Lift it again.

        Args:
            kind: of the hold.
            source: who raised it.
        """


class FlowManager:
    """Knows every resource that registered and is still alive (F1). Thread-safe.

    It keeps no resource alive. It holds a resource exactly while everything is stopped and the resource is registered:
    what registers after `stop_all` is stopped at once, and what is unregistered is let go.

    Args:
        name: the source of its holds; managers that share a resource need names of their own.
    """

    #: The kind of the hold that `stop_all` raises.
    HOLD = "paused"

    def __init__(self, name: str = "manager") -> None:
        #: The source of its holds.
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
        """Take a resource into the registry, and stop it if everything is stopped. What its `hold` raises keeps it out.

        Args:
            resource: what to take in; a second time changes nothing.
        """
        with self._lock:
            if self._stopped is not None:
                resource.hold(self.HOLD, source=self.name, detail=self._stopped)
            self._resources.add(resource)

    def unregister(self, resource: FlowResource) -> None:
        """Forget a resource, and let it go if everything is stopped: nobody would start it later.

        Args:
            resource: what to forget; one that is not registered is no error, and is left as it is.
        """
        with self._lock:
            if resource in self._resources:
                self._resources.discard(resource)
                if self._stopped is not None:
                    resource.lift(self.HOLD, source=self.name)

    def stop_all(self, reason: str = "") -> int:
        """Stop all producers (D5): raise a hold on every resource, and on those that come later.

        Args:
            reason: for people; it is the detail of the hold.

        Returns:
            How many resources there are.

        Raises:
            ExceptionGroup: what the `hold` of some resources raised; all others are stopped.
        """
        with self._lock:
            self._stopped = reason
            return self._each("stopped", lambda resource: resource.hold(self.HOLD, source=self.name, detail=reason))

    def start_all(self) -> int:
        """Start all producers (D5): lift the hold that `stop_all` raised, and no other.

        Returns:
            How many resources there are.

        Raises:
            ExceptionGroup: what the `lift` of some resources raised; all others are started.
        """
        with self._lock:
            self._stopped = None
            return self._each("started", lambda resource: resource.lift(self.HOLD, source=self.name))

    def forked(self) -> None:
        """In a child process after a fork: a thread that is not there may have been at work in it."""
        self._lock = threading.RLock()

    def _each(self, done: str, do: Callable[[FlowResource], None]) -> int:
        errors = []
        resources = tuple(self._resources)
        for resource in resources:
            # Another's hold may have led to its end.
            if resource not in self._resources:
                continue
            try:
                do(resource)
            except Exception as error:
                error.add_note(f"{resource.name!r} could not be {done}")
                errors.append(error)
        if errors:
            raise ExceptionGroup(
                f"{len(errors)} of {len(resources)} resources could not be {done}; the others are", errors
            )
        return len(self._resources)
