"""A producer's health, and readiness probes that report it (E12)."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol

from qflow_client.events import FlowState, HoldKind

__all__ = ["Health", "asgi_readiness", "wsgi_readiness"]

# Each burst of messages may raise and lift holds of these kinds. So they do not change the health.
_PASSING = (HoldKind.CAPACITY, HoldKind.RATE, HoldKind.TRANSPORT)

# Value of the header Retry-After in seconds.
_RETRY_AFTER = "5"


@dataclass(frozen=True, slots=True)
class Health:
    """A producer's health at one moment.

    Attributes:
        state: ``"ready"``, ``"blocked"`` (by the broker or another lasting hold), ``"disconnected"`` or ``"closed"``.
        reasons: reasons for a state other than ``"ready"``, as texts for people. The texts contain no password.
        since: time in seconds since 1970 when the producer became blocked (flowed); ``None`` without a lasting hold.
        unsettled: number of unsettled messages in the window.
        stored: number of messages in the outbox; 0 if there is no outbox.
        spills: whether `send` puts messages into the outbox while the producer is flowed.
    """

    state: str
    reasons: tuple[str, ...]
    since: float | None
    unsettled: int
    stored: int
    spills: bool

    @property
    def is_ready(self) -> bool:
        """Whether `send` accepts messages: immediately, after a short hold such as ``capacity``, or into the outbox."""
        return self.state == "ready" or (self.spills and self.state != "closed")

    @classmethod
    def of(cls, flow: FlowState, *, unsettled: int, stored: int, spills: bool, last_failure: str = "") -> Health:
        """Return the health of a producer. `last_failure` is the error of the last try to connect, or empty."""
        lasting = [hold for hold in flow.holds if hold.kind not in _PASSING]
        if flow.closed is not None:
            state = "closed"
        elif any(hold.kind == HoldKind.DISCONNECTED for hold in lasting):
            state = "disconnected"
        else:
            state = "blocked" if lasting else "ready"
        reasons = [f"{hold.kind}: {hold.detail}" if hold.detail else str(hold.kind) for hold in lasting]
        if flow.closed is not None:
            reasons = [flow.closed]
        elif state == "disconnected" and last_failure:
            reasons.append(f"the last attempt to connect failed: {last_failure}")
        return cls(state, tuple(reasons), flow.since if lasting else None, unsettled, stored, spills)


class HasHealth(Protocol):
    """A producer, or another object with a name and a method `health`."""

    @property
    def name(self) -> str: ...

    def health(self) -> Health: ...


def _answer(producers: Iterable[HasHealth]) -> tuple[int, list[tuple[str, str]], bytes]:
    found = [(producer.name, producer.health()) for producer in producers]
    # If several producers have the same name, the last one is shown. So sort the producers that are not ready last.
    found.sort(key=lambda named: not named[1].is_ready)
    is_ready = all(health.is_ready for _, health in found)
    body = json.dumps({name: {"state": health.state, "reasons": health.reasons} for name, health in found}).encode()
    headers = [("content-type", "application/json"), ("content-length", str(len(body)))]
    if not is_ready:
        headers.append(("retry-after", _RETRY_AFTER))
    return 200 if is_ready else 503, headers, body


def asgi_readiness(*producers: HasHealth) -> Callable[..., Awaitable[None]]:
    """Return an ASGI application that answers 200 if all producers are ready, else 503 with ``Retry-After``."""

    async def answer(
        scope: MutableMapping[str, Any], receive: Callable[..., Any], send: Callable[..., Awaitable[None]]
    ) -> None:
        if scope["type"] != "http":
            return
        status, headers, body = _answer(producers)
        encoded = [(name.encode(), value.encode()) for name, value in headers]
        await send({"type": "http.response.start", "status": status, "headers": encoded})
        await send({"type": "http.response.body", "body": body})

    return answer


def wsgi_readiness(*producers: HasHealth) -> Callable[..., Iterable[bytes]]:
    """Return a WSGI application that answers 200 if all producers are ready, else 503 with ``Retry-After``."""

    def answer(_environment: Mapping[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
        status, headers, body = _answer(producers)
        start_response("200 OK" if status == 200 else "503 Service Unavailable", headers)
        return [body]

    return answer
