"""`connect` makes a connection of pika that the application shares with any number of producers.

A `BlockingConnection` belongs to one thread of the application, and does I/O only while this thread calls pika. But
producers need the socket at any time. So a `Carrier` with an I/O thread is between pika and the socket. It transfers
pika's frames, and the frames of the producers' channels, which pika does not know. Only the application's thread runs
pika's connection, and no other thread waits for this thread. Each producer has a `SharedLink` on the connection.
"""

from __future__ import annotations

import copy
import logging
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from struct import Struct
from typing import Any
from urllib.parse import quote

import pika
import pika.connection
from pika.adapters.select_connection import IOLoop
from pika.adapters.utils.selector_ioloop_adapter import SelectorIOServicesAdapter

from qflow_client.amqp.frames import (
    CHANNEL_CLOSE,
    CHANNEL_CLOSE_OK,
    CHANNEL_OPEN,
    CHANNEL_OPEN_OK,
    CONFIRM_SELECT,
    CONFIRM_SELECT_OK,
    CONNECTION_CLOSE,
    CONNECTION_TUNE_OK,
    HEARTBEAT,
    METHOD_FRAME,
    FrameSplitter,
    frame,
)
from qflow_client.amqp.tap import Tap
from qflow_client.core.protocol import ProducerProtocol
from qflow_client.errors import SettingsError
from qflow_client.guard import Guard, serve
from qflow_client.logs import log
from qflow_client.redaction import hide_password, shown
from qflow_client.settings import check_setting, check_timeout
from qflow_client.skin import BRIEF, GIVEN_UP, connection_failed, lost, no_answer, no_confirms
from qflow_client.sync.channel_io import ChannelIO
from qflow_client.sync.latch import Latch
from qflow_client.sync.link import _words, url_parameters
from qflow_client.sync.pika_io import TapIOServices

__all__ = ["SharedLink", "TappedConnection", "connect"]

_CHUNK = 1 << 16
# While more than this number of pika's bytes are unwritten, the carrier reads nothing from pika.
_HIGH = 1 << 16
# Size of the protocol header ("AMQP" and the version). pika sends this header before the first frame.
_GREETING_SIZE = 8
# The channel limit, the frame limit and the heartbeat interval in Connection.Tune-Ok.
_TUNE = Struct(">HIH")
_CHANNEL_MAX = 65535
# ``Channel.Close`` with reply code 200, an empty reply text, and 0 as class id and method id.
_GOOD_BYE = CHANNEL_CLOSE + bytes((0, 200, 0, 0, 0, 0, 0))


class _SocketServices(TapIOServices):
    """pika's I/O services for the I/O thread of a `Carrier`."""

    def __init__(self, tap: Tap, lock: Guard, after: Callable[[], None], drained: Callable[[], None]) -> None:
        super().__init__(tap, lock, after)
        self._drained = drained
        # Whether any data was received since the last heartbeat check.
        self.heard = False

    def received(self, data: bytes) -> bytes:
        self.heard = True
        return super().received(data)

    def remove_writer(self, fd: int) -> bool:
        """Same as pika's method, and call `drained`. pika's transport calls the method when all its data is written."""
        had = super().remove_writer(fd)
        self._drained()
        return had


class Carrier:
    """Transfers the bytes of one connection between pika and the socket, on its own thread.

    Args:
        url: the broker's URL without secrets, for logs and errors.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.tap = Tap()
        # Guards the tap, the `ProducerProtocol` of each producer on the connection, `_links` and `ended`.
        self.lock = Guard()
        self.services = _SocketServices(self.tap, self.lock, self._after, self._go_on_reading)
        # The producers' links. Each change makes a new tuple, so a loop over the old tuple is safe.
        self._links: tuple[SharedLink, ...] = ()
        # Why the transfer has ended; ``None`` while the transfer runs.
        self.ended: str | None = None
        # The maximum channel number, and the maximum frame size in bytes. pika and the broker have negotiated both.
        self.channel_max = _CHANNEL_MAX
        self.frame_max = 0
        # Channel numbers that pika has used.
        self._pikas: set[int] = set()
        # Channel numbers that producers use.
        self._taken: set[int] = set()
        # The carrier's end of the socket pair to pika.
        self._far: socket.socket
        # Received data that is not written to `_far` yet.
        self._to_pika: deque[bytes] = deque()
        self._splitter = FrameSplitter()
        # Whether the protocol header was read from pika.
        self._greeted = False
        # Whether reading from pika is paused.
        self._paused = False
        # pika's transport for the broker's socket; ``None`` before the connection is established.
        self._transport: Any = None
        # pika's object that establishes the connection; ``None`` while no connection is being established.
        self._connecting: Any = None
        # Called with ``None`` when the connection is established, or with the error.
        self._on_done: Callable[[BaseException | None], None]
        # Why the connection is about to end, if the carrier knows the reason; otherwise ``None``.
        self._why: str | None = None
        # Number of consecutive heartbeat checks without data from the broker.
        self._silent = 0
        # The heartbeat interval in seconds; 0 for no heartbeats.
        self._heartbeat = 0
        self._thread = threading.Thread(target=serve, args=(self._run,), name=f"qflow-io {url}", daemon=True)

    def start(
        self,
        sock: Any,
        ssl_context: ssl.SSLContext | None,
        server_hostname: str | None,
        on_done: Callable[[BaseException | None], None],
    ) -> socket.socket:
        """Begin to transfer data between a connected socket and a new socket for pika.

        Args:
            on_done: called on the I/O thread, with ``None`` (after the handshake if TLS is used) or with an error.

        Returns:
            The socket that pika uses instead of `sock`. The connection ends when pika closes this socket.
        """
        near, self._far = socket.socketpair()
        near.setblocking(False)
        self._far.setblocking(False)
        self._on_done = on_done
        self._connecting = self.services.create_streaming_connection(
            lambda: self, sock, self._connected, ssl_context, server_hostname
        )
        self._thread.start()
        return near

    def add(self, link: SharedLink) -> str | None:
        """Add a producer's link. If the transfer has ended, only return the reason. Any thread may call this method."""

        def add() -> str | None:
            if self.ended is None:
                self._links += (link,)
            return self.ended

        return self.lock.take(add)

    # The methods below run on the I/O thread.

    def remove(self, link: SharedLink) -> None:
        with self.lock:
            self._links = tuple(each for each in self._links if each is not link)

    def take_number(self) -> int:
        """Return a free channel number for a producer; 0 if there is none.

        pika takes the lowest free number, so the method returns the highest free number that pika has never used.
        """
        for number in range(self.channel_max, 0, -1):
            if number not in self._taken and number not in self._pikas:
                self._taken.add(number)
                return number
        return 0

    def give_back(self, number: int) -> None:
        self._taken.discard(number)

    def write(self, number: int, method: bytes) -> None:
        """Write a method frame on a producer's channel, between pika's frames."""
        if self.ended is None:
            self._transport.write(frame(METHOD_FRAME, number, method))

    def _run(self) -> None:
        try:
            self.services.set_reader(self._far.fileno(), self._on_readable)
            self.services.run()
        except BaseException as error:
            # After any error, all waiting callers must get an error, and the connection must end.
            log(logging.ERROR, "%s: the I/O thread failed, and the connection is closed", self.url, error=error)
            if self.services.tapped is not None:
                self.services.tapped.close()
            self._end(f"the I/O thread failed: {error!r}")
        finally:
            if self.services.tapped is not None:
                self.services.tapped.close()
            self._far.close()
            self.services.close()

    def _connected(self, result: Any) -> None:
        # Delete the callback, because its reference to pika's connection would keep the connection alive.
        on_done = self._on_done
        del self._on_done
        self._connecting = None
        if isinstance(result, BaseException):
            self._end(_words(result))
            on_done(result)
        else:
            on_done(None)

    def _after(self) -> None:
        for link in self._links:
            link.after_io()

    def _beat(self) -> None:
        """Send a heartbeat, because pika's thread may be busy. Abort after four checks in a row without any data."""
        if self.ended is not None:
            return
        self._silent = 0 if self.services.heard else self._silent + 1
        self.services.heard = False
        if self._silent >= 4:
            self._why = f"the broker sent nothing, not even heartbeats, at a heartbeat interval of {self._heartbeat} s"
            assert self.services.tapped is not None
            self.services.tapped.cut()
            return
        if not self._transport.get_write_buffer_size():
            self._transport.write(HEARTBEAT)
        self.services.call_later(self._heartbeat / 2, self._beat)

    def _end(self, why: str) -> None:
        with self.lock:
            if self.ended is not None:
                return
            self.ended = why
            links = self._links
        for link in links:
            link.lost(why)
        self.services.remove_reader(self._far.fileno())
        # pika first gets the data that was already received, and then notices the end of the connection.
        self._feed()

    # The methods below implement pika's `AbstractStreamProtocol`. pika's transport calls them.

    def connection_made(self, transport: Any) -> None:
        """Store the transport. The TLS handshake, if there is one, is complete."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Pass received data to pika. The `Tap` has already removed the frames of the producers' channels."""
        self._to_pika.append(data)
        if len(self._to_pika) == 1:
            self._feed()

    def eof_received(self) -> bool:
        """Return False, so that pika's transport closes the connection, because the broker will send nothing more."""
        return False

    def connection_lost(self, error: BaseException | None) -> None:
        # Without an error, pika's transport has read the end of the data.
        why = "the broker closed the socket" if error is None else _words(error)
        self._end(lost(self._why or self.tap.closed or why))

    # The methods below use the socket pair to pika.

    def _feed(self) -> None:
        waiting = self._to_pika
        while waiting:
            try:
                sent = self._far.send(waiting[0])
            except BlockingIOError:
                sent = 0
            except OSError:
                # pika has closed its end of the socket pair.
                waiting.clear()
                break
            if sent < len(waiting[0]):
                waiting[0] = waiting[0][sent:]
                self.services.set_writer(self._far.fileno(), self._feed)
                return
            waiting.popleft()
        self.services.remove_writer(self._far.fileno())
        if self.ended is not None:
            self.services.stop()

    def _on_readable(self) -> None:
        try:
            data = self._far.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            if self._connecting is not None:
                self._connecting.cancel()
            self._to_pika.clear()
            self._end(lost(self._why or "the application dropped it"))
            return
        if not self._greeted:
            self._greeted = True
            self._transport.write(data[:_GREETING_SIZE])
            data = data[_GREETING_SIZE:]
        end = 0
        for kind, number, start, stop in self._splitter.feed(data):
            if kind == METHOD_FRAME:
                self._look(number, self._splitter.data[start : start + 12])
            end = stop + 1
        if end:
            self._transport.write(self._splitter.data[:end])
            if self._transport.get_write_buffer_size() > _HIGH:
                self._paused = True
                self.services.remove_reader(self._far.fileno())

    def _go_on_reading(self) -> None:
        if self._paused and self.ended is None and self._transport.get_write_buffer_size() <= _HIGH:
            self._paused = False
            self.services.set_reader(self._far.fileno(), self._on_readable)

    def _look(self, number: int, payload: bytes) -> None:
        """Record the channel number, the negotiated limits or the close that a method frame from pika contains."""
        method = payload[:4]
        if method == CHANNEL_OPEN:
            self._pikas.add(number)
        elif method == CONNECTION_TUNE_OK:
            channel_max, self.frame_max, self._heartbeat = _TUNE.unpack_from(payload, 4)
            self.channel_max = channel_max or _CHANNEL_MAX
            self.tap.frame_max = self.frame_max
            self.tap.heartbeat = float(self._heartbeat)
            if self._heartbeat:
                self.services.call_later(self._heartbeat / 2, self._beat)
        elif method == CONNECTION_CLOSE:
            self._why = "it was closed"


class _PikaServices(SelectorIOServicesAdapter):
    """pika's I/O services for the application's thread. A `Carrier` transfers the data of each socket."""

    # The carrier of the newest socket; not set before the first socket.
    carrier: Carrier

    def __init__(self, loop: Any, url: str) -> None:
        super().__init__(loop)
        self._url = url

    def create_streaming_connection(
        self,
        protocol_factory: Any,
        sock: Any,
        on_done: Any,
        ssl_context: ssl.SSLContext | None = None,
        server_hostname: str | None = None,
    ) -> Any:
        link_up = super().create_streaming_connection
        carrier = self.carrier = Carrier(self._url)
        establishing = _Establishing()

        def carries(error: BaseException | None) -> None:
            if error is not None:
                establishing.near.close()
                on_done(error)
            elif establishing.step is None:
                establishing.step = link_up(protocol_factory, establishing.near, on_done)

        establishing.near = carrier.start(
            sock, ssl_context, server_hostname, lambda error: self.add_callback_threadsafe(partial(carries, error))
        )
        return establishing


class _Establishing:
    """Lets pika cancel a connection that is being established."""

    # pika's end of the socket pair between pika and the carrier.
    near: socket.socket
    # pika's object that establishes the connection; ``None`` before pika makes it; False if `cancel` was called before.
    step: Any = None

    def cancel(self) -> bool:
        if self.step is not None:
            return bool(self.step and self.step.cancel())
        self.step = False
        self.near.close()
        return True


class _Maker:
    """Makes the `SelectConnection` of a `BlockingConnection`. pika uses this object like a connection class."""

    services: _PikaServices

    def __init__(self, url: str) -> None:
        self._url = url

    def create_connection(self, connection_configs: Any, on_done: Any, custom_ioloop: Any = None) -> Any:
        services = self.services = _PikaServices(custom_ioloop or IOLoop(), self._url)
        start: Any = pika.SelectConnection._start_connection_workflow  # type: ignore[attr-defined]  # private
        return start(
            connection_configs=connection_configs,
            connection_factory=lambda parameters: pika.SelectConnection(
                parameters, custom_ioloop=services, internal_connection_workflow=False
            ),
            nbio=services,
            workflow=None,
            on_done=on_done,
        )


class TappedConnection(pika.BlockingConnection):
    """pika's `BlockingConnection`, on which producers can open channels."""

    def __init__(self, parameters: pika.connection.Parameters, url: str) -> None:
        maker = _Maker(url)
        super().__init__(parameters, maker)  # type: ignore[arg-type]  # used like a class
        #: Transfers the bytes between pika and the socket (internal).
        self.carrier = maker.services.carrier


def connect(
    url: str | pika.connection.Parameters,
    *,
    timeout: float | None = None,
    client_properties: dict[str, Any] | None = None,
) -> pika.BlockingConnection:
    """Connect with pika, for consumers and for any number of producers: ``Producer(connection=…)``.

    Like any `BlockingConnection`, the connection belongs to one thread, which runs the consumers. Other threads can
    make, use and close producers on the connection, even while the connection's thread is busy. An I/O thread reads and
    writes the socket and sends heartbeats. The I/O thread keeps received messages in memory until pika reads them. So
    consumers should limit the number of unacknowledged messages with ``basic_qos``.

    Args:
        url: ``amqp://`` or ``amqps://`` URL with pika's query parameters, or pika's own connection parameters.
        timeout: the longest time in seconds to connect to one address; ``None`` for pika's own limits.
        client_properties: properties that the connection sends to the broker, such as ``connection_name``.

    Returns:
        A `BlockingConnection` of pika, on which producers can open channels.

    Raises:
        ConnectionFailed: connecting failed; the text gives the reason.
        SettingsError: `url` is neither a valid URL nor an object with pika's connection parameters.
        TypeError, ValueError: `timeout` is not a number.
    """
    check_timeout(timeout)
    if isinstance(url, str):
        check_setting("url", url)
    parameters = url_parameters(url) if isinstance(url, str) else copy.copy(url)
    if not isinstance(parameters, pika.connection.Parameters):
        raise SettingsError(f"url={shown(url)}: it must be a URL, or pika's connection parameters")
    address = hide_password(url) if isinstance(url, str) else _address(parameters)
    if timeout is not None:
        if timeout <= 0:
            raise no_answer(address, timeout)
        parameters.socket_timeout = min(timeout, parameters.socket_timeout or timeout)
        parameters.stack_timeout = min(timeout, parameters.stack_timeout or timeout)
    if client_properties is not None:
        parameters.client_properties = (parameters.client_properties or {}) | client_properties
    try:
        return TappedConnection(parameters, address)
    except Exception as error:
        raise connection_failed(address, _words(error)) from error


def _address(parameters: Any) -> str:
    scheme = "amqp" if parameters.ssl_options is None else "amqps"
    return f"{scheme}://{parameters.host}:{parameters.port}/{quote(parameters.virtual_host, safe='')}"


class SharedLink(ChannelIO):
    """The publishing channel of a producer on a shared connection.

    pika does not know the channel. The I/O thread opens and closes it, and does not need the application's thread.
    """

    def __init__(self, connection: TappedConnection, protocol: ProducerProtocol, after: Callable[[], None]) -> None:
        carrier = self._carrier = connection.carrier
        super().__init__(protocol, carrier.lock, after)
        self._tap = carrier.tap
        self.writer = self.services = carrier.services
        # Keeps pika's object alive, because the connection ends when the garbage collector deletes the object.
        self._shared = connection
        # The channel's number; ``None`` before the channel is opened and after it is closed.
        self._number: int | None = None
        # Whether to close the channel as soon as no message is partly written.
        self._leaves = False
        # Whether this side has sent ``Channel.Close``.
        self._is_closing = False
        # Set when the messages are settled and the producer no longer uses the channel.
        self._parted = Latch()
        # Set when the channel is closed, or will never be opened.
        self._left = Latch()

    @property
    def url(self) -> str:
        return self._carrier.url

    @property
    def last_failure(self) -> str:
        """Always empty, because a lost shared connection is not replaced."""
        return ""

    def open(self, timeout: float) -> None:
        """Open the channel.

        Args:
            timeout: maximum seconds to wait for the answers of the broker.

        Raises:
            ConnectionFailed: the channel could not be opened; the text gives the reason.
        """
        if self._protocol.settings.confirms and not self._shared.publisher_confirms_supported:
            raise self._failed(no_confirms("the broker does not announce them"))
        ended = self._carrier.add(self)
        if ended is not None:
            raise self._failed(f"the connection is not open: {ended}")
        try:
            self.services.add_callback_threadsafe(self._open_channel)
            self._opened.result(min(timeout, threading.TIMEOUT_MAX))
        except BaseException as error:
            self._opened.cancel()
            self.close(BRIEF)
            if isinstance(error, TimeoutError):
                closed = self._carrier.tap.closed
                raise (self._failed(lost(closed)) if closed else no_answer(self.url, timeout)) from None
            raise

    def close(self, timeout: float) -> None:
        """Settle all unsettled messages with the reason `GIVEN_UP`, and close the channel.

        Wait at most `timeout` seconds until the broker confirms the close.
        """
        if self.ended:
            return
        self.services.add_callback_threadsafe(self._leave)
        try:
            self._left.wait(timeout)
        finally:
            self.services.add_callback_threadsafe(self._abandon)
        self._parted.wait(BRIEF)

    # The methods below run on the I/O thread.

    def _open_channel(self) -> None:
        number = self._carrier.take_number()
        if not number:
            most = self._carrier.channel_max
            self._not_opened(f"all {most} channels that the broker allows on a connection are in use")
            self._gone()
            return
        self._number = number
        with self._lock:
            self._tap.expect(number)
            # The tap calls this function under the lock, so the function only schedules the call of `_on_method`.
            self._tap.own(
                number, lambda payload: self.services.add_callback_threadsafe(partial(self._on_method, payload))
            )
        self._carrier.write(number, CHANNEL_OPEN + b"\0")

    def _on_method(self, payload: bytes) -> None:
        number = self._number
        if number is None:
            return
        method = payload[:4]
        if method == CHANNEL_OPEN_OK and self._protocol.settings.confirms:
            self._carrier.write(number, CONFIRM_SELECT + b"\0")
        elif method in (CHANNEL_OPEN_OK, CONFIRM_SELECT_OK):
            self._ready(number)
        elif method == CHANNEL_CLOSE:
            self._carrier.write(number, CHANNEL_CLOSE_OK)
            # If this side has also sent ``Channel.Close``, wait for the broker's ``Channel.Close-Ok``.
            if not self._is_closing:
                code, text = int.from_bytes(payload[4:6], "big"), payload[7 : 7 + payload[6]].decode("utf-8", "replace")
                self.lost(f"the channel was closed: {code} {text}")
        elif method == CHANNEL_CLOSE_OK:
            self._gone()

    def _ready(self, number: int) -> None:
        if not self._opened.set_running_or_notify_cancel():
            return
        self._attach(number, self._carrier.frame_max)
        self._opened.set_result(None)
        self._after_io()
        self.services.pump()

    def after_io(self) -> None:
        """Report events and receipts, and continue a close that waited for the rest of a partly written message."""
        self._after_io()
        if self._leaves:
            with self._lock:
                has_ended = self._protocol.end_writing()
            if has_ended:
                self._part()

    def _leave(self) -> None:
        self._leaves = True
        self.services.pump()
        # If no message is partly written, `after_io` closes the channel. AMQP forbids a close inside a message.
        self.after_io()

    def _abandon(self) -> None:
        """If a message is still partly written, settle the messages but leave the channel open."""
        if self._leaves:
            log(
                logging.WARNING,
                "%s: channel %s is left open, because a message on it is partly written and the broker does not read "
                "the rest",
                self._protocol.settings.name,
                self._number,
            )
            self._part(closes=False)

    def _part(self, *, closes: bool = True) -> None:
        """Settle all messages, and use the channel no more. If `closes` is True, begin to close the channel."""
        self._leaves = False
        self._settle(GIVEN_UP)
        if self._number is None or self.ended:
            self._gone()
        elif closes:
            self._is_closing = True
            self._carrier.write(self._number, _GOOD_BYE)
        self._parted.set()

    def _settle(self, why: str) -> None:
        with self._lock:
            if self._number is not None:
                self._tap.detach(self._number)
            self._protocol.connection_lost(why, time.monotonic())
        self._after_io()
        # If a frame is partly written, write the rest of the frame.
        self.services.pump()

    def lost(self, why: str) -> None:
        self._leaves = False
        if not self._not_opened(why):
            self._settle(why)
        self._gone()

    def _gone(self) -> None:
        """Record that the channel is closed, or will never be opened."""
        if self._number is not None:
            with self._lock:
                self._tap.detach(self._number)
                self._tap.disown(self._number)
            self._carrier.give_back(self._number)
            self._number = None
        self._carrier.remove(self)
        with self._lock:
            self.ended = True
        # Report the remaining events and receipts. Later ones are reported by the thread that causes them.
        self._after()
        self._parted.set()
        self._left.set()
