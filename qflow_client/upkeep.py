"""Supervises the open connection of a producer.

`Upkeep` probes a silent broker (`Watch`) and the first host (`Returner`), and replaces credentials before they expire
(`Renewer`). `Upkeep` ends the connection if the broker is silent or blocks it for too long. It also ends the connection
if the first host answers again, or if the credentials cannot be replaced in time. The producer then connects again.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from qflow_client.amqp.tap import Tap
from qflow_client.background import Timer
from qflow_client.core.protocol import ProducerProtocol
from qflow_client.guard import Guard
from qflow_client.recovery import Reconnection, Watch, silent
from qflow_client.renewal import Asker, Renewer
from qflow_client.returning import Returner

__all__ = ["Upkeep"]

# Bytes that the system's send buffer holds unsent with `liveness`. The watch does not see that a broker reads them.
_UNSENT = 1 << 17


class Upkeep:
    """Supervises a connection of a producer, on the thread or loop of the connection.

    Args:
        call_later: calls a function on the thread or loop of the connection after a number of seconds.
        post: calls a function on the thread or loop of the connection. Any thread may call `post`.
        leave: ends the connection; the argument is the reason.
        asker: requests credentials; ``None`` if the URLs contain them.
    """

    def __init__(
        self,
        reconnection: Reconnection,
        protocol: ProducerProtocol,
        guard: Guard,
        call_later: Callable[[float, Callable[[], None]], Timer],
        post: Callable[[Callable[[], object]], object],
        leave: Callable[[str], object],
        asker: Asker | None,
    ) -> None:
        settings = protocol.settings
        self._reconnection = reconnection
        self._protocol = protocol
        self._guard = guard
        self._call_later = call_later
        self._post = post
        self._leave = leave
        self._watch = Watch(settings, reconnection.hosts)
        # The timer of the next `_look`; ``None`` if no check is planned.
        self._next_look: Timer | None = None
        self._returner = Returner(reconnection, settings, call_later, post, leave)
        #: Gets the credentials of each connection; ``None`` if the URLs contain them.
        self.renewer: Renewer | None = None
        if asker is not None:
            self.renewer = Renewer(asker, settings, call_later, post, self._update_secret, leave)
        # The `Tap` of the open connection; ``None`` without an open connection.
        self._tap: Tap | None = None
        # The argument `pump` of the last call of `begin`.
        self._pump: Callable[[], object]

    def begin(self, tap: Tap, pump: Callable[[], object], sock: Any, now: float) -> None:
        """Start the supervision of an open connection. `pump` writes the producer's waiting frames to `sock`."""
        self._tap, self._pump = tap, pump
        if self._protocol.settings.liveness is not None and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            with suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT)
        self._watch.opened(now)
        self._look_later()
        self._returner.begin()
        if self.renewer is not None:
            self.renewer.begin()

    def end(self) -> None:
        self._tap = None
        if self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None
        self._returner.end()
        if self.renewer is not None:
            self.renewer.end()

    def too_late(self, timeout: float) -> str:
        """Return the text for an attempt to connect that has not ended in time."""
        if self.renewer is not None and self.renewer.is_asking:
            return f"the callable for credentials did not return within {timeout:.3g} s"
        return silent(timeout)

    def _look_later(self) -> None:
        if self._watch.period is not None:
            self._next_look = self._call_later(self._watch.period, self._look)

    def _look(self) -> None:
        tap = self._tap
        if tap is None:
            return
        why = self._guard.take(partial(self._ask, tap))
        if why:
            self._returner.served_until(self._watch.served_until)
            self._reconnection.move_on()
            self._leave(why)
            return
        self._look_later()
        self._pump()

    def _ask(self, tap: Tap) -> str | None:
        protocol = self._protocol
        number = protocol.channel.number
        why = self._watch.look(
            time.monotonic(),
            heard_at=tap.alive_at,
            is_due=number is not None and protocol.in_flight > 0,
            is_blocked=tap.is_blocked,
            settled=protocol.settled_so_far,
        )
        if why == "" and number is not None and not tap.is_probed(number):
            protocol.put_control(tap.probe(number))
        return why

    def _update_secret(self, secret: str, done: Callable[[], object]) -> bool:
        tap, protocol = self._tap, self._protocol
        if tap is None:
            return False

        def update() -> bool:
            is_open = protocol.channel.number is not None
            if is_open:
                protocol.put_control(tap.update_secret(secret, lambda: self._post(done)))
            return is_open

        is_open = self._guard.take(update)
        self._pump()
        return is_open
