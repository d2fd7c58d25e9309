"""A connection of pika's on an I/O thread of its own, with the tap at its socket."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pika
from pika.exceptions import ConnectionClosed as PikaConnectionClosed

from qflow_client.errors import ConnectionFailed, SettingsError
from qflow_client.protocol import ProducerProtocol
from qflow_client.settings import ProducerSettings, hide_password
from qflow_client.sync.pika_io import TapIOServices
from qflow_client.tap import Tap

__all__ = ["Link", "parameters"]

logger = logging.getLogger(__name__)

# Seconds that the end of a connection that is cut may take; it waits for no peer.
_CUT_GRACE = 0.3


def _words(error: object) -> str:
    """What went wrong, in one line."""
    if isinstance(error, PikaConnectionClosed):
        return f"{error.reply_code} {error.reply_text}"
    # pika wraps what happened in what it was doing, several times.
    causes = getattr(error, "exceptions", None) or getattr(error, "args", ())
    cause = causes[-1] if causes else getattr(error, "exception", None)
    if isinstance(getattr(error, "exception", None), BaseException):
        cause = error.exception  # type: ignore[attr-defined]  # AMQPConnectorException's
    if isinstance(cause, BaseException):
        return _words(cause)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def parameters(url: str, settings: ProducerSettings) -> pika.URLParameters:
    """What pika is told of one host.

    Args:
        url: its URL; the query is pika's.
        settings: the producer's.

    Raises:
        SettingsError: pika does not understand the URL, or cannot use a file that it names.
    """
    try:
        found = pika.URLParameters(url)
    except (SyntaxError, TypeError, ValueError) as error:
        raise SettingsError(f"url={hide_password(url)!r}: {error}") from error
    except OSError as error:
        # The TLS library names no file.
        raise SettingsError(f"url={hide_password(url)!r}: a file of ssl_options cannot be used: {error}") from error
    found.client_properties = {
        "connection_name": settings.name,
        "product": "qflow_client",
    } | (found.client_properties or {})
    # pika's own defaults would cut a longer `connect_timeout` short; what the URL says does.
    said = dict(parse_qsl(urlsplit(url).query))
    for name in ("socket_timeout", "stack_timeout"):
        own = getattr(found, name) if name in said else None
        setattr(found, name, min(settings.connect_timeout, own or settings.connect_timeout))
    return found


class Link:
    """One connection, its I/O thread, and the publishing channel on it.

    The thread runs pika's own loop, so heartbeats go on whatever the application does.

    Args:
        url: where to connect, for people.
        connect_to: the same for pika, from `parameters`.
        protocol: the producer's state; everybody who touches it holds `lock`.
        lock: the lock.
        after: called on the I/O thread, without the lock, after anything that may have changed the protocol.
    """

    def __init__(
        self,
        url: str,
        connect_to: pika.URLParameters,
        protocol: ProducerProtocol,
        lock: threading.Lock,
        after: Callable[[], None],
    ) -> None:
        self._url = hide_password(url)
        self._connect_to = connect_to
        self._protocol = protocol
        self._lock = lock
        self._after = after
        self._tap = Tap()
        self.services = TapIOServices(self._tap, lock, self._after_io)
        self._connection: pika.SelectConnection | None = None
        # Set once the channel is there, or failed once it cannot be.
        self._opened: Future[None] = Future()
        # When the timer that is armed fires; None if none is.
        self._timer_at: float | None = None
        self._thread = threading.Thread(target=self._run, name=f"qflow-io {protocol.settings.name}", daemon=True)

    def open(self, timeout: float) -> None:
        """Connect and open the channel.

        Args:
            timeout: seconds that connecting, authenticating and opening the channel may take together.

        Raises:
            ConnectionFailed: it cannot be had, and why.
        """
        self._thread.start()
        try:
            try:
                self._opened.result(min(timeout, threading.TIMEOUT_MAX))
            except TimeoutError:
                if self._opened.cancel():
                    raise
                # Decided at the last moment.
                self._opened.result(_CUT_GRACE)
        except BaseException as error:
            self._opened.cancel()
            self.cut()
            if isinstance(error, TimeoutError):
                raise ConnectionFailed(f"{self._url}: no answer within {timeout:.3g} s") from None
            raise

    def close(self, timeout: float) -> None:
        """Give up what is unsettled, and end the connection: in order if the broker answers soon, otherwise cut it.

        Args:
            timeout: seconds that the broker may take to answer.
        """
        self.services.add_callback_threadsafe(self._leave)
        try:
            self._thread.join(timeout)
        finally:
            self.cut()
        self._thread.join(_CUT_GRACE)

    def cut(self) -> None:
        """End the connection at once, if it has not ended."""
        self.services.add_callback_threadsafe(self._cut)

    def forget(self) -> None:
        """In a child process after a fork: let go of the parent's socket without a word to the broker."""
        self.services.forget()

    def arm_timer(self) -> None:
        """Have the protocol told when its time comes. For any thread."""
        self.services.add_callback_threadsafe(self._arm_timer)

    # On the I/O thread.

    def _run(self) -> None:
        try:
            self._connection = pika.SelectConnection(
                self._connect_to,
                on_open_callback=self._on_open,
                on_open_error_callback=self._on_open_error,
                on_close_callback=self._on_close,
                custom_ioloop=self.services,
            )
            self.services.run()
        except BaseException as error:
            # Whoever waits must learn of it, whatever it is, and so must the broker.
            logger.exception("%s: the I/O thread failed", self._protocol.settings.name)
            if self.services.tapped is not None:
                self.services.tapped.close()
            self._lost(f"the I/O thread failed: {error!r}")
        finally:
            self.services.close()

    def _on_open(self, connection: Any) -> None:
        channel = connection.channel(on_open_callback=self._on_channel_open)
        with self._lock:
            self._tap.expect(channel.channel_number)

    def _on_open_error(self, _connection: Any, error: BaseException) -> None:
        self._lost(_words(error))

    def _on_channel_open(self, channel: Any) -> None:
        channel.add_on_close_callback(self._on_channel_close)
        # The tap takes these out, until the channel is left; then they are for nobody, and pika would warn of them.
        channel.add_on_flow_callback(lambda _flow: None)
        channel.add_on_return_callback(lambda *_returned: None)
        if not self._protocol.settings.confirms:
            self._ready(channel)
            return
        try:
            # Likewise.
            channel.confirm_delivery(lambda _answer: None, callback=lambda _select_ok: self._ready(channel))
        except Exception as error:
            # pika raises when the broker does not announce confirms.
            self._fail(f"publisher confirms cannot be had: {_words(error)}; confirms=False does without")

    def _ready(self, channel: Any) -> None:
        if not self._opened.set_running_or_notify_cancel():
            return
        parameters = channel.connection.params
        now = time.monotonic()
        self._tap.heartbeat = float(parameters.heartbeat or 0)
        self._tap.frame_max = parameters.frame_max
        try:
            with self._lock:
                self._protocol.channel_opened(channel.channel_number, parameters.frame_max, now)
                self._tap.attach(channel.channel_number, self._protocol, now)
        except BaseException as error:
            # Nobody else would tell who waits.
            self._not_opened(f"the channel cannot be used: {error!r}")
            raise
        self._opened.set_result(None)
        self._after_io()
        self.services.pump()

    def _on_channel_close(self, _channel: Any, reason: BaseException) -> None:
        # Nothing else is on this connection.
        self._fail(_words(reason))

    def _fail(self, why: str) -> None:
        self._not_opened(why)
        self._close()

    def _not_opened(self, why: str) -> bool:
        """Whether the channel was never there; then `open` learns why."""
        try:
            self._opened.set_exception(ConnectionFailed(f"{self._url}: {why}"))
        except InvalidStateError:
            return self._opened.cancelled() or self._opened.exception() is not None
        return True

    def _leave(self) -> None:
        with self._lock:
            number = self._protocol.channel
            if number is not None:
                self._tap.detach(number)
            self._protocol.connection_lost("the producer is closed", time.monotonic())
        self._after_io()
        # A broker that blocks the connection, or does not read, reads no good-bye either.
        tapped = self.services.tapped
        if self._tap.is_blocked or (tapped is not None and tapped.full):
            self._cut()
        else:
            self.services.pump()
            self._close()

    def _on_close(self, _connection: Any, reason: BaseException) -> None:
        self._lost(f"the connection is lost: {_words(reason)}")

    def _lost(self, why: str) -> None:
        if not self._not_opened(why):
            with self._lock:
                self._protocol.connection_lost(why, time.monotonic())
            self._after_io()
        self.services.stop()

    def _close(self) -> None:
        connection = self._connection
        if connection is not None and not (connection.is_closing or connection.is_closed):
            connection.close()

    def _cut(self) -> None:
        if self.services.tapped is not None:
            self.services.tapped.cut()
        else:
            # Not connected yet, or lost.
            self._close()

    def _after_io(self) -> None:
        self._after()
        if self._protocol.settings.rate is not None:
            self._arm_timer()

    def _arm_timer(self) -> None:
        now = time.monotonic()
        with self._lock:
            at = self._protocol.next_timer(now)
        if at is not None and (self._timer_at is None or at < self._timer_at):
            self._timer_at = at
            self.services.call_later(max(0.0, at - now), self._on_timer)

    def _on_timer(self) -> None:
        self._timer_at = None
        with self._lock:
            self._protocol.on_timer(time.monotonic())
        self._after_io()
        self.services.pump()
