"""A connection that belongs to one `Producer`. pika runs the connection on an I/O thread, with a `Tap` at the socket.

At the start, `Engine` makes a `Link` for each host that it tries. After a loss of its connection, a link can reconnect.
"""

from __future__ import annotations

import copy
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pika
from pika.exceptions import (
    AuthenticationError,
    ChannelClosedByBroker,
    ConnectionClosedByBroker,
    ProtocolVersionMismatch,
)
from pika.exceptions import ConnectionClosed as PikaConnectionClosed

from qflow_client.amqp import coalescing
from qflow_client.amqp.tap import Tap
from qflow_client.background import join
from qflow_client.core.protocol import ProducerProtocol
from qflow_client.errors import SettingsError
from qflow_client.guard import Guard, serve
from qflow_client.logs import log, take_over
from qflow_client.recovery import Reconnection, is_final
from qflow_client.redaction import shown, words_of
from qflow_client.renewal import Answer, Asker, Failure
from qflow_client.settings import ProducerSettings
from qflow_client.skin import (
    GIVEN_UP,
    NOT_CONNECTED,
    client_properties,
    connection_failed,
    log_connected,
    log_failed_try,
    lost,
    no_confirms,
)
from qflow_client.sync.channel_io import ChannelIO
from qflow_client.sync.pika_io import TapIOServices
from qflow_client.topology import Declaration, Topology
from qflow_client.upkeep import Upkeep

__all__ = ["Link", "parameters", "url_parameters"]

# Otherwise a log handler that waits for a producer would stop the I/O thread that could end the wait.
take_over("pika")

# Maximum seconds to wait until the I/O thread has aborted a connection. An abort needs no answer of the broker.
_CUT_GRACE = 0.2
# Seconds by which pika's time limits for connecting exceed `connect_timeout`, so that `connect_timeout` expires first.
_MARGIN = 1.0


# The format in which pika reports the broker's reply when the broker refuses a connection.
_REFUSED = re.compile(r"ConnectionClosedByBroker: \((\d+)\) (.*)", re.DOTALL)


def _cause(error: object) -> object:
    """Return the original error, which pika has wrapped in other errors."""
    if isinstance(error, PikaConnectionClosed):
        return error
    causes = getattr(error, "exceptions", None) or getattr(error, "args", ())
    cause = causes[-1] if causes else getattr(error, "exception", None)
    if isinstance(getattr(error, "exception", None), BaseException):
        cause = error.exception  # type: ignore[attr-defined]  # AMQPConnectorException's
    return _cause(cause) if isinstance(cause, BaseException) else error


def _words(error: object) -> str:
    cause = _cause(error)
    if isinstance(cause, PikaConnectionClosed):
        return f"{cause.reply_code} {cause.reply_text}"
    return f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__


def _is_final(error: object) -> bool:
    cause = _cause(error)
    if isinstance(cause, PikaConnectionClosed):
        return is_final(cause.reply_code, cause.reply_text)
    said = _REFUSED.search(str(cause))
    if said is not None:
        return is_final(int(said[1]), said[2])
    return isinstance(cause, (AuthenticationError, ProtocolVersionMismatch))


def url_parameters(url: str) -> pika.URLParameters:
    """Return pika's parameters for a URL.

    Raises:
        SettingsError: pika rejects the URL, or cannot use a file of its ``ssl_options``.
    """
    try:
        return pika.URLParameters(url)
    except OSError as error:
        # The error of the TLS library does not contain the file's name, so name the parameter of the URL.
        why = f"a file of ssl_options cannot be used: {words_of(error, url)}"
    except (AttributeError, SyntaxError, TypeError, ValueError) as error:
        why = words_of(error, url)
    # Raise outside the handlers, so that the error has no context: the original error may contain the password.
    raise SettingsError(f"url={shown(url)}: {why}")


def parameters(url: str, settings: ProducerSettings) -> pika.URLParameters:
    """Return the `url_parameters` of one host, with the settings applied."""
    found = url_parameters(url)
    found.client_properties = client_properties(settings.name) | (found.client_properties or {})
    # pika's default limits may be shorter than `connect_timeout`. Use longer limits, unless the URL contains a limit.
    said = dict(parse_qsl(urlsplit(url).query))
    latest = settings.connect_timeout + _MARGIN
    for name in ("socket_timeout", "stack_timeout"):
        own = getattr(found, name) if name in said else None
        setattr(found, name, min(latest, own or latest))
    return found


class Link(ChannelIO):
    """The producer's connection, its I/O thread, and the publishing channel.

    The I/O thread runs pika's own loop, so heartbeats are sent even if the application is busy.

    Args:
        hosts: pika's connection parameters for each host, made by `parameters`. They are made again for each reconnect.
        topology: the objects to declare each time before the channel is opened; ``None`` for nothing.
        asker: requests the credentials; ``None`` if the hosts' URLs contain the credentials.
    """

    def __init__(
        self,
        hosts: list[pika.URLParameters],
        reconnection: Reconnection,
        protocol: ProducerProtocol,
        lock: Guard,
        after: Callable[[], None],
        topology: Topology | None = None,
        asker: Asker | None = None,
    ) -> None:
        self._hosts = hosts
        self._topology = topology
        self._settings = protocol.settings
        self._reconnection = reconnection
        super().__init__(protocol, lock, after)
        self._tap = Tap()
        self.writer = self.services = TapIOServices(self._tap, lock, self._after_io, self._delay)
        self.services.order_addresses = self._order_addresses
        self.services.loop.handle = self._handle
        later, post = self.services.call_later, self.services.add_callback_threadsafe
        self._upkeep = Upkeep(reconnection, protocol, lock, later, post, self._leave_host, asker)
        # pika's connection; ``None`` between two tries to connect, and while credentials are requested.
        self._connection: pika.SelectConnection | None = None
        # Whether pika's connection is open, and whether a publishing channel was opened on this connection.
        self._is_open = self._is_up = False
        # Whether this link is ending, so that it does not reconnect.
        self._leaves = False
        # The timer that starts the next try to open a connection or channel, or ends a try that takes too long.
        self._next: Any = None
        # Set while this link ends the connection: the reason, and whether later tries to connect would fail too.
        self._cut_for: tuple[str, bool] | None = None
        self._thread = threading.Thread(
            target=serve, args=(self._run,), name=f"qflow-io {self._settings.name}", daemon=True
        )

    def _delay(self, size: int) -> float:
        return coalescing.delay(size, self._protocol.in_flight)

    @property
    def url(self) -> str:
        return self._reconnection.url

    @property
    def last_failure(self) -> str:
        """Why the last finished try to connect failed; empty if this try succeeded, or if no try has finished."""
        return self._reconnection.last

    def open(self, timeout: float) -> None:
        """Connect and open the channel. With the setting `connect_in_background`, only start to connect.

        Args:
            timeout: the longest time in seconds to connect, authenticate and open the channel, together.

        Raises:
            ConnectionFailed: the connection or the channel could not be opened; the text gives the reason.
        """
        if self._settings.connect_in_background:
            now = time.monotonic()
            self._reconnection.lost(NOT_CONNECTED, now)
            with self._lock:
                self._protocol.start_in_background(now)
            self._after()
            self._opened.set_result(None)
            self._thread.start()
            return
        self._thread.start()
        try:
            try:
                self._opened.result(min(timeout, threading.TIMEOUT_MAX))
            except TimeoutError:
                if self._opened.cancel():
                    raise
                # The connection was opened, or failed, just before the call of `cancel`.
                self._opened.result(_CUT_GRACE)
        except BaseException as error:
            self._opened.cancel()
            self._leaves = True
            why = self._upkeep.too_late(timeout)
            self.cut()
            if isinstance(error, TimeoutError):
                raise connection_failed(self.url, why) from None
            raise

    def close(self, timeout: float) -> None:
        """Settle messages with the reason `GIVEN_UP`, and close the connection; abort it after `timeout` seconds."""
        if self._thread.ident is None:
            # Ctrl-C has interrupted `open` before the start of the thread.
            self.services.close()
            return
        self.services.add_callback_threadsafe(self._leave)
        try:
            join(self._thread, timeout)
        finally:
            self.cut()
        join(self._thread, _CUT_GRACE)

    def cut(self) -> None:
        """Abort the connection, if it has not ended."""
        self.services.add_callback_threadsafe(self._cut)

    # The methods below run on the I/O thread.

    def _run(self) -> None:
        try:
            if self._settings.connect_in_background:
                # `open` does not wait, so this timer ends a try that takes too long.
                self._next = self.services.call_later(self._settings.connect_timeout, self._time_is_up)
            self._connect()
            self.services.run()
        except BaseException as error:
            # After any error, all waiting callers must get an error, and the connection must end.
            log(
                logging.ERROR,
                "%s: the I/O thread failed, and the connection is closed",
                self._settings.name,
                error=error,
            )
            if self.services.tapped is not None:
                self.services.tapped.close()
            self._leaves = True
            self._lost(f"the I/O thread failed: {error!r}")
        finally:
            with self._lock:
                self.ended = True
            # Pass on the remaining events and receipts. Later ones are passed on by the thread that executes the step.
            self._after()
            self.services.close()

    def _handle(self, error: Exception) -> bool:
        """If pika raises an error while it connects, let only this try to connect fail, and return True.

        For example, the process has no free file descriptor for a socket, or cannot start a thread for `getaddrinfo`.
        """
        if self._connection is None or self._is_open or self._cut_for is not None:
            return False
        self._cut_for = _words(error), False
        self._cut()
        return True

    def _connect(self) -> None:
        if self._upkeep.renewer is None:
            self._connect_with(self._hosts[self._reconnection.host])
        else:
            self._upkeep.renewer.log_in(self._log_in)

    def _order_addresses(self, found: list[Any]) -> list[Any]:
        addresses, seconds = self._reconnection.addresses(found)
        connection = self._connection
        if len(addresses) > 1 and connection is not None:
            connection.params.socket_timeout = min(seconds, connection.params.socket_timeout or seconds)
        return addresses

    def _log_in(self, answer: Answer) -> None:
        if isinstance(answer, Failure):
            self._lost(answer.why)
            return
        parameters = copy.copy(self._hosts[self._reconnection.host])
        parameters.credentials = pika.PlainCredentials(answer.username, answer.password)
        self._connect_with(parameters)

    def _connect_with(self, parameters: pika.URLParameters) -> None:
        self._connection = pika.SelectConnection(
            parameters,
            on_open_callback=self._on_open,
            on_open_error_callback=self._on_open_error,
            on_close_callback=self._on_close,
            custom_ioloop=self.services,
        )

    def _connect_again(self) -> None:
        with self._lock:
            self._tap = self.services.tap = Tap()
        self._next = self.services.call_later(self._settings.connect_timeout, self._time_is_up)
        reconnection = self._reconnection
        try:
            # Read the files of ssl_options again, because the certificates may have been replaced.
            self._hosts[reconnection.host] = parameters(reconnection.host_url, self._settings)
        except SettingsError as error:
            # Use what was read before. For example, a process without root rights any more cannot read its key again.
            words = "%s: the certificates that were read before are used again: %s"
            log(logging.WARNING, words, self._settings.name, error)
        self._connect()

    def _time_is_up(self) -> None:
        self._next = None
        self._cut_for = self._upkeep.too_late(self._settings.connect_timeout), False
        self._cut()

    def _open_channel(self) -> None:
        """Open another channel, because the broker has closed the channel but not the connection."""
        self._next = None
        connection = self._connection
        if connection is not None and connection.is_open:
            self._next = self.services.call_later(self._settings.connect_timeout, self._time_is_up)
            self._on_open(connection)

    def _on_open(self, connection: Any) -> None:
        self._is_open = True
        if self._topology is None:
            self._publish_on(connection)
        else:
            declarations = self._topology.declarations()
            connection.channel(on_open_callback=lambda channel: self._declare(channel, declarations))

    def _declare(self, channel: Any, declarations: Iterator[Declaration]) -> None:
        """Make the declarations on `channel`, and then open the publishing channel."""
        channel.add_on_close_callback(lambda _channel, reason: ended(reason))
        connection = channel.connection
        declaration: Declaration | None = None

        def go_on(opening: Callable[[], object]) -> None:
            # pika frees the number of `channel` after the callback, and the broker may allow only one channel.
            self.services.add_callback_threadsafe(
                lambda: opening() if connection.is_open and not self._leaves else None
            )

        def ended(reason: BaseException) -> None:
            if isinstance(reason, (ChannelClosedByBroker, ConnectionClosedByBroker)) and declaration is not None:
                if declaration.accepts(reason.reply_code):
                    go_on(lambda: connection.channel(on_open_callback=lambda other: self._declare(other, declarations)))
                    return
                is_final = declaration.is_final(reason.reply_code)
                # If the broker closed the connection, and the reply code is not final, `_on_close` handles the loss.
                if is_final or isinstance(reason, ChannelClosedByBroker):
                    self._fail(declaration.refusal(f"{reason.reply_code} {reason.reply_text}"), final=is_final)
            else:
                go_on(lambda: self._publish_on(connection))

        def declare_next(_ok: object = None) -> None:
            nonlocal declaration
            declaration = next(declarations, None)
            if declaration is None:
                channel.close()
            else:
                getattr(channel, declaration.method)(**declaration.arguments, callback=declare_next)

        declare_next()

    def _publish_on(self, connection: Any) -> None:
        channel = connection.channel(on_open_callback=self._on_channel_open)
        with self._lock:
            self._tap.expect(channel.channel_number)

    def _on_open_error(self, _connection: Any, error: BaseException) -> None:
        self._lost(_words(error), _is_final(error))

    def _on_channel_open(self, channel: Any) -> None:
        channel.add_on_close_callback(self._on_channel_close)
        if not self._settings.confirms:
            self._ready(channel)
            return
        try:
            # The tap removes the confirms from the received data, so pika never calls the first callback.
            channel.confirm_delivery(lambda _answer: None, callback=lambda _select_ok: self._ready(channel))
        except Exception as error:
            # pika raises an error if the broker does not announce confirms.
            self._fail(no_confirms(_words(error)), final=True)

    def _ready(self, channel: Any) -> None:
        # `open` waits only for the first channel. If `open` has given up, do not use this channel.
        if self._opened.cancelled() or not (self._opened.done() or self._opened.set_running_or_notify_cancel()):
            return
        parameters = channel.connection.params
        self._tap.heartbeat = float(parameters.heartbeat or 0)
        self._tap.frame_max = parameters.frame_max
        self._attach(channel.channel_number, parameters.frame_max)
        self._forget_next()
        if not self._is_up:
            self._is_up, now = True, time.monotonic()
            self._reconnection.opened(now)
            self._upkeep.begin(self._tap, self.services.pump, self.services.tapped, now)
            if not self._opened.done():
                self._opened.set_result(None)
            else:
                log_connected(self._settings.name, self.url, self._reconnection.verdict)
        self._after_io()
        self.services.pump()

    def _leave_host(self, why: str) -> None:
        """Abort the open connection for the reason `why`. The link then connects again."""
        self._cut_for = why, False
        self._cut()

    def _on_channel_close(self, _channel: Any, reason: BaseException) -> None:
        if self._is_up and not self._leaves and isinstance(reason, ChannelClosedByBroker):
            with self._lock:
                pause = self._reconnection.channel_closed(self._protocol.settled_so_far, time.monotonic())
                wanted = self._protocol.wants_channel
            if wanted:
                self._forget_next()
                self._next = self.services.call_later(pause, self._open_channel)
                return
        # Close the connection too, because only this channel uses it.
        self._fail(_words(reason))

    def _fail(self, why: str, *, final: bool = False) -> None:
        self._not_opened(why)
        self._cut_for = self._cut_for or (why, final)
        self._close()

    def _leave(self) -> None:
        self._leaves = True
        with self._lock:
            number = self._protocol.channel.number
            if number is not None:
                self._tap.detach(number)
            self._protocol.connection_lost(GIVEN_UP, time.monotonic())
        self._after_io()
        tapped = self.services.tapped
        if self._connection is None:
            # There is no connection. Cancel the next try to connect.
            self._forget_next()
            self._upkeep.end()
            self.services.stop()
        # Abort if no channel is open yet. Also abort if the broker does not read, because it would not read a close.
        elif not self._is_up or self._tap.is_blocked or (tapped is not None and tapped.full):
            self._cut()
        else:
            self.services.pump()
            self._close()

    def _on_close(self, _connection: Any, reason: BaseException) -> None:
        self._lost(_words(reason), _is_final(reason))

    def _lost(self, why: str, final: bool = False) -> None:
        """Handle a lost connection or a failed try to connect. `final` is True if later tries would fail too."""
        self._connection = None
        self._is_open = False
        self._forget_next()
        self._upkeep.end()
        if self._cut_for is not None:
            (why, final), self._cut_for = self._cut_for, None
        if self._not_opened(why):
            self.services.stop()
            return
        was_up, self._is_up = self._is_up, False
        now = time.monotonic()
        host, reconnection = self.url, self._reconnection
        pause = None
        if not self._leaves:
            pause = reconnection.lost(lost(why), now) if was_up else reconnection.failed(why, final, now)
            why = reconnection.verdict
        with self._lock:
            wanted = self._protocol.connection_lost(why, now, reconnects=pause is not None)
        self._after_io()
        if pause is None or not wanted:
            self.services.stop()
            return
        if not was_up:
            log_failed_try(self._settings.name, host, reconnection.last, pause)
        self._next = self.services.call_later(pause, self._connect_again)

    def _forget_next(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None

    def _close(self) -> None:
        connection = self._connection
        if connection is not None and not (connection.is_closing or connection.is_closed):
            connection.close()

    def _cut(self) -> None:
        if self._is_open:
            # Close first, because pika logs an error if an open connection ends without a close.
            self._close()
            self.services.abort()
        elif self.services.tapped is not None:
            self.services.tapped.cut()
        elif self._upkeep.renewer is not None and self._upkeep.renewer.is_asking:
            self._lost("")
        else:
            # The connection is not established yet, or is lost.
            self._close()
