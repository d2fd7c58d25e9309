"""The registry of flow resources in a process, to inspect all and to stop and start them by hand (F1 F5 F6 D5)."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Protocol

__all__ = ["FlowManager", "FlowResource"]


class FlowResource(Protocol):
    """A resource that a manager can stop and start.

    It must be hashable and weakly referable. A manager calls `hold` and `lift` under its own lock, so neither may wait
    for a thread that calls the manager.
    """

    @property
    def name(self) -> str:
        """A name for people, which need not be unique."""

    def hold(self, kind: str, *, source: str, detail: str) -> None:
        """Raise a hold on the resource's gate.

        Args:
            kind: the reason, as one word.
            source: the owner of the hold.
            detail: a text for people.
        """

    def lift(self, kind: str, *, source: str) -> None:
        """Lift the hold again.

        Args:
            kind: of the hold.
            source: the owner of the hold.
        """


class FlowManager:
    """A registry of all resources that registered and still exist (F1). Thread-safe.

    It keeps no resource alive. It holds a resource while everything is stopped and the resource is registered. A
    resource that registers after `stop_all` is held immediately. A resource that is unregistered is released.

    Args:
        name: the source of its holds; managers that share a resource need different names.
    """

    #: The kind of the hold that `stop_all` raises.
    HOLD = "paused"

    def __init__(self, name: str = "manager") -> None:
        #: The source of its holds.
        self.name = name
        # Reentrant. The garbage collector can run a resource's finalizer at any point in here, and the finalizer
        # unregisters the resource.
        self._lock = threading.RLock()
        self._resources: weakref.WeakSet[FlowResource] = weakref.WeakSet()
        # Why everything is stopped; ``None`` while it is not.
        self._stopped: str | None = None

    @property
    def resources(self) -> tuple[FlowResource, ...]:
        """The registered resources, in no order."""
        with self._lock:
            return tuple(self._resources)

    @property
    def is_stopped(self) -> bool:
        """Whether everything is stopped, by `stop_all`."""
        return self._stopped is not None

    def register(self, resource: FlowResource) -> None:
        """Register a resource, and stop it if everything is stopped.

        If its `hold` raises an error, the resource is not registered.

        Args:
            resource: the resource; a second registration changes nothing.
        """
        with self._lock:
            if self._stopped is not None:
                resource.hold(self.HOLD, source=self.name, detail=self._stopped)
            self._resources.add(resource)

    def unregister(self, resource: FlowResource) -> None:
        """Unregister a resource, and start it if everything is stopped. No later call would start it.

        Args:
            resource: the resource. If it is not registered, nothing changes.
        """
        with self._lock:
            if resource in self._resources:
                self._resources.discard(resource)
                if self._stopped is not None:
                    resource.lift(self.HOLD, source=self.name)

    def stop_all(self, reason: str = "") -> int:
        """Stop all producers (D5): raise a hold on every resource, also on those that register later.

        Args:
            reason: a text for people, which becomes the detail of the hold.

        Returns:
            How many resources there are.

        Raises:
            ExceptionGroup: the errors of `hold` of some resources; all others are stopped.
        """
        with self._lock:
            self._stopped = reason
            return self._each("stopped", lambda resource: resource.hold(self.HOLD, source=self.name, detail=reason))

    def start_all(self) -> int:
        """Start all producers (D5): lift the hold that `stop_all` raised, and no other.

        Returns:
            How many resources there are.

        Raises:
            ExceptionGroup: the errors of `lift` of some resources; all others are started.
        """
        with self._lock:
            self._stopped = None
            return self._each("started", lambda resource: resource.lift(self.HOLD, source=self.name))

    def forked(self) -> None:
        """Renew the lock in a child process after a fork, because a thread of the parent may have held it."""
        self._lock = threading.RLock()

    def _each(self, done: str, do: Callable[[FlowResource], None]) -> int:
        errors = []
        resources = tuple(self._resources)
        for resource in resources:
            # The hold of another resource may have led to the end of this one.
            if resource not in self._resources:
                continue
            try:
                do(resource)
            except Exception as error:
                error.add_note(f"{resource.name!r} could not be {done}")
                errors.append(error)
        if errors:
            raise ExceptionGroup(
                f"{len(errors)} of {len(resources)} resources could not be {done}, but the others were", errors
            )
        return len(self._resources)
