"""A registry that lists, stops and starts the flow resources in a process (F1 F5 F6 D5)."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

from qflow_client.locks import RLock

__all__ = ["FlowManager", "FlowResource"]


class FlowResource(Protocol):
    """A resource that a manager can stop and start.

    A resource must be hashable and weakly referable. A manager calls `hold` and `lift` under the manager's lock. So
    `hold` and `lift` must not wait for a thread that calls the manager.
    """

    @property
    def name(self) -> str:
        """Name for people; need not be unique."""

    def hold(self, kind: str, *, source: str, detail: str) -> None:
        """Raise a hold on the gate of the resource."""

    def lift(self, kind: str, *, source: str) -> None:
        """Lift the hold of this kind and source."""


class FlowManager:
    """A thread-safe registry with weak references to its resources (F1).

    Args:
        name: the source of the holds. If two managers register the same resource, they need different names.
    """

    #: Kind of the hold that `stop_all` raises.
    HOLD = "paused"

    def __init__(self, name: str = "manager") -> None:
        #: The source of the holds.
        self.name = name
        # Reentrant, because a finalizer of a resource may call `unregister` while this thread has the lock.
        self._lock = RLock()
        self._resources: weakref.WeakSet[FlowResource] = weakref.WeakSet()
        # The reason that was passed to `stop_all`; ``None`` if the resources are not stopped.
        self._stopped: str | None = None

    @property
    def resources(self) -> tuple[FlowResource, ...]:
        """The registered resources, in any order."""
        with self._lock:
            return tuple(self._resources)

    @property
    def is_stopped(self) -> bool:
        """Whether all resources are stopped by `stop_all`."""
        return self._stopped is not None

    def register(self, resource: FlowResource) -> None:
        """Register a resource, and stop it if all resources are stopped.

        If `FlowResource.hold` raises an exception, the resource is not registered.

        Args:
            resource: the resource. If it is already registered, nothing changes.
        """
        with self._lock:
            if self._stopped is not None:
                resource.hold(self.HOLD, source=self.name, detail=self._stopped)
            self._resources.add(resource)

    def unregister(self, resource: FlowResource) -> None:
        """Unregister a resource. If all resources are stopped, start this one, because `start_all` will not start it.

        Args:
            resource: the resource. If it is not registered, nothing changes.
        """
        with self._lock:
            if resource in self._resources:
                self._resources.discard(resource)
                if self._stopped is not None:
                    resource.lift(self.HOLD, source=self.name)

    def stop_all(self, reason: str = "") -> int:
        """Stop all resources (D5): raise a hold on each of them, and on resources that register before `start_all`.

        Args:
            reason: text for people, used as the detail of the hold.

        Returns:
            The number of registered resources.

        Raises:
            ExceptionGroup: `hold` of some resources has failed. All other resources are stopped.
        """
        with self._lock:
            self._stopped = reason
            return self._each("stopped", lambda resource: resource.hold(self.HOLD, source=self.name, detail=reason))

    def start_all(self) -> int:
        """Start all resources (D5): lift the hold that `stop_all` has raised. Other holds stay.

        Returns:
            The number of registered resources.

        Raises:
            ExceptionGroup: `lift` of some resources has failed. All other resources are started.
        """
        with self._lock:
            self._stopped = None
            return self._each("started", lambda resource: resource.lift(self.HOLD, source=self.name))

    def forked(self) -> None:
        """Replace the lock in a forked child process, because another thread of the parent may have had the lock."""
        self._lock = RLock()

    def _each(self, done: str, do: Callable[[FlowResource], None]) -> int:
        errors = []
        resources = tuple(self._resources)
        for resource in resources:
            # The calls of `do` for other resources may have unregistered this one. If so, skip it.
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
