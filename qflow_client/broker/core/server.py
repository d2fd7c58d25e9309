"""The sockets of the broker: asyncio transports and timers around the sessions.

Each `Connection` feeds a `Session` with the bytes of its socket, and writes the session's output. If something changes
in an iteration of the event loop, `Server._end_turn` runs after the iteration. It lets each connection write its output
once. It also checks the memory limit and the bytes that wait for the disk. A socket is not read in three cases:

- Too many bytes wait to be written to the socket.
- The session holds input, or is in a tarpit: a pause for a client that ignores ``Channel.Flow`` (D8).
- The client publishes or does not read, while memory is full or too many bytes wait for the disk.

An error in the handling of a connection closes only that connection.

A session handles received bytes for at most `Server.SLICE` seconds, and holds (keeps) the rest. Connections with held
input continue one after the other. Small input does not wait for larger input of other clients, see `Server.TURN`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import cast

from qflow_client.broker.core.channelflow import Discipline
from qflow_client.broker.core.controls import Controls
from qflow_client.broker.core.errors import ReplyCode
from qflow_client.broker.core.listener import Listener
from qflow_client.broker.core.logs import get_logger
from qflow_client.broker.core.ports import Journal
from qflow_client.broker.core.session import Session, State
from qflow_client.broker.core.settings import DEFAULT_USERS, is_loopback
from qflow_client.broker.core.virtualhost import VirtualHost

__all__ = ["Server"]

_log = get_logger(__name__)


class Server:
    """Listens on a socket, and runs one session for each connection.

    Args:
        on_change: called after each iteration of the loop in which something has changed.
        discipline: see `Session`.
    """

    #: Maximum seconds that a stopping broker waits for clients to close their connections.
    STOP_GRACE = 1.0
    #: After this many seconds without input, the broker closes an ended session's connection, or its sending side.
    QUIET = 0.1
    #: Maximum seconds in which the input of one connection is handled before other connections are served.
    SLICE = 0.005
    #: In the first TURN seconds of an iteration of the loop, the input of each connection gets SLICE seconds. Later in
    #: the iteration, input of at most SMALL_INPUT bytes gets SHORT_SLICE seconds, and larger input waits.
    TURN = 0.01
    SMALL_INPUT = 4096
    SHORT_SLICE = 0.0005
    #: Minimum seconds between two log lines about connections that are closed because of their buffers.
    LOG_PERIOD = 60.0

    def __init__(
        self,
        host: VirtualHost,
        controls: Controls,
        on_change: Callable[[], None],
        discipline: Callable[[Session], Discipline] | None = None,
    ) -> None:
        self.settings = host.settings
        self.host = host
        self.controls = controls
        self.discipline = discipline
        # All connections, the oldest first.
        self.connections: dict[Connection, None] = {}
        # Connections that are perhaps not open yet. Open connections stay here until the dict becomes too large.
        self._strangers: dict[Connection, None] = {}
        # Number of connections whose sessions have ended, but whose sockets are not closed yet.
        self.finished = 0
        self.clock = time.monotonic
        self._on_change = on_change
        self._listener: Listener | None = None
        self._checker: ThreadPoolExecutor | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        # Connections that will continue with held input, in this order.
        self._with_input: dict[Connection, None] = {}
        # End of the TURN seconds of this iteration, or 0 if no input was handled yet.
        self._busy_until = 0.0
        # Connections with output to write after this iteration, in the order of writing.
        self._writers: dict[Connection, None] = {}
        self._turn_ends = False
        # Time of the next call of `Timers.tick`, and the loop's timer for this call.
        self._tick_at = math.inf
        self._ticker: asyncio.TimerHandle | None = None
        # Whether too many bytes wait for the disk, and whether memory is full. In both cases publishers are not read.
        self._waits_for_disk = False
        self._waits_for_memory = False
        # Whether the server itself has raised the memory alarm. The server does not clear an alarm of the operator.
        self._has_memory_alarm = False
        # Held input bytes of all connections whose first message waits for memory or for the disk.
        self.first_publishes = 0
        self._log_cut_at = -math.inf
        # Set by `stop`. New connections are then closed immediately.
        self.is_stopping = False

    @property
    def sessions(self) -> tuple[Session, ...]:
        """The sessions that have not ended, oldest first."""
        sessions = (connection.session for connection in self.connections)
        return tuple(session for session in sessions if session.state is not State.ENDED)

    async def start(self) -> int:
        """Start to listen, and return the port.

        Raises:
            OSError: the address is in use or does not belong to this machine.
        """
        settings = self.settings
        self._loop = asyncio.get_running_loop()
        self.host.logins.run = self._check_password
        listener = Listener(
            lambda: Connection(self),
            settings.ssl_context,
            settings.unauthenticated_timeout,
            settings.max_unauthenticated,
        )
        port = await listener.start(settings.host, settings.port)
        self._listener = listener
        _log.info("listening on %s:%d", settings.host, port)
        if not is_loopback(settings.host) and settings.users == DEFAULT_USERS:
            reason = (
                "but no user can log in from another machine"
                if settings.loopback_users.issuperset(DEFAULT_USERS)
                else "which other machines may reach, and guest's password is well known"
            )
            _log.warning("listening on %s:%d, %s; set users", settings.host, port, reason)
        # Timers of queues that a store has filled are due perhaps already.
        self.touch()
        return port

    async def stop(self) -> None:
        """Stop listening and close all connections."""
        if self._listener is None:
            return
        self.is_stopping = True
        await self._listener.stop()
        now, code = self.clock(), ReplyCode.CONNECTION_FORCED
        for connection in tuple(self.connections):
            connection.session.fail(code, f"{code.title} - the broker shuts down", now)
            connection.session.end()
        self._end_turn()
        for connection in tuple(self.connections):
            connection.close_when_quiet()
        if self.connections:
            await asyncio.wait([connection.lost for connection in self.connections], timeout=self.STOP_GRACE)
        for connection in tuple(self.connections):
            connection.abort()
        while self.connections:
            await asyncio.wait([connection.lost for connection in self.connections])
        self._listener = None
        self._loop = None
        if self._checker is not None:
            self._checker.shutdown(wait=False, cancel_futures=True)
        if self._ticker is not None:
            self._ticker.cancel()

    def _check_password(self, function: Callable[[], bool], done: Callable[[bool], None]) -> None:
        """Check a hashed password by calling `function` on a thread, one check at a time. Then call `done`."""
        if self._loop is None:
            return
        if self._checker is None:
            self._checker = ThreadPoolExecutor(1, thread_name_prefix="qflow-login")

        def checked(future: asyncio.Future[bool]) -> None:
            if self._loop is None or future.cancelled():
                return
            error = future.exception()
            if error is not None:
                _log.error("a password could not be checked, so the login is refused: %s", str(error))
            done(error is None and future.result())

        self._loop.run_in_executor(self._checker, function).add_done_callback(checked)

    def has_output(self, connection: Connection) -> None:
        """Record that a connection has output. The connection writes after all others that have output now."""
        self._writers.pop(connection, None)
        self._writers[connection] = None
        self.touch()

    def touch(self) -> None:
        """Schedule `_end_turn`, because something has changed in this iteration."""
        if not self._turn_ends and self._loop is not None:
            self._turn_ends = True
            self._loop.call_soon(self._end_turn)

    def slice_end(self, now: float, size: int) -> float:
        """Return the time at which the handling of `size` new bytes must stop; `now` if these bytes have to wait."""
        if not self._busy_until:
            self._busy_until = now + self.TURN
        if now < self._busy_until:
            return now + self.SLICE
        return now + self.SHORT_SLICE if size <= self.SMALL_INPUT else now

    def go_on_later(self, connection: Connection) -> None:
        """Let a connection continue with its held input after the connections that already wait to continue."""
        self._with_input[connection] = None
        self.touch()

    def add_stranger(self, connection: Connection) -> None:
        """Record a new connection. If too many connections are not open yet, drop the oldest of them."""
        self._strangers[connection] = None
        limit = self.settings.max_unauthenticated
        if len(self._strangers) > limit:
            self._strangers = {each: None for each in self._strangers if not each.session.was_opened}
        if len(self._strangers) > limit:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            text = "%s: cut before it was open, because %d newer connections are not open either (max_unauthenticated)"
            _log.warning(text, oldest.name, limit)
            oldest.abort()

    def forget(self, connection: Connection) -> None:
        for connections in (self.connections, self._strangers, self._with_input):
            connections.pop(connection, None)

    def _go_on(self) -> None:
        """Let connections continue with their held input until the TURN seconds of this iteration are over."""
        for connection in tuple(self._with_input):
            del self._with_input[connection]
            connection.go_on()
            if self.clock() >= self._busy_until:
                break
        if self._with_input:
            self.touch()

    def _end_turn(self) -> None:
        self._turn_ends = False
        self._busy_until = 0.0
        writers, self._writers = self._writers, {}
        now = self.clock()
        for connection in writers:
            try:
                connection.send(now)
            except Exception:
                _log.exception("%s: output could not be encoded; the connection is cut", connection.session.name)
                connection.abort()
        for connection in writers:
            connection.output_sent()
        if self.host.timers.next_tick < self._tick_at:
            self._set_ticker()
        if self.host.journal is not None:
            self._check_memory(self.host.journal)
        if self._with_input:
            self._go_on()
        self._on_change()

    def check_growth(self) -> None:
        """If memory is above a limit, check it now, because more connections may read input before `_end_turn`."""
        journal = self.host.journal
        if journal is not None and journal.limit:
            is_full = journal.held > journal.limit and not self._waits_for_memory
            if is_full or journal.unfinished > journal.limit // 2:
                self._check_memory(journal)

    def _check_memory(self, journal: Journal) -> None:
        """Stop reading from publishers while too many bytes wait for the disk, or while memory is full."""
        self.host.relieve()
        was_paused = self.is_paused
        backlog = journal.max_backlog // 2 if self._waits_for_disk else journal.max_backlog
        self._waits_for_disk = journal.backlog_size > backlog
        if journal.limit:
            if journal.unfinished > journal.limit // 2:
                self._close_unfinished(journal)
            self._limit_buffers(journal)
            limit = journal.limit // 8 * 7 if self._waits_for_memory else journal.limit
            self._waits_for_memory = journal.held > limit
            self._check_memory_alarm(journal)
        self.host.takes_no_publisher = self.is_paused
        if self.is_paused is not was_paused:
            for connection in self.connections:
                connection.pause(self.is_paused)

    def _check_memory_alarm(self, journal: Journal) -> None:
        if journal.held > journal.limit and "memory" not in self.controls.alarms:
            self._has_memory_alarm = True
            self.set_alarm("memory", f"{journal.held} bytes of messages are in memory, of at most {journal.limit}")
        elif self._has_memory_alarm and not self._waits_for_memory:
            self._has_memory_alarm = False
            self.set_alarm("memory", None)

    def set_alarm(self, name: str, reason: str | None) -> None:
        """Raise an alarm for all connections. Without a reason, clear the alarm."""
        if reason is not None:
            self.controls.alarms[name] = reason
        else:
            self.controls.alarms.pop(name, None)
        for session in self.sessions:
            session.block(name, reason)
        self.touch()

    @property
    def is_paused(self) -> bool:
        return self._waits_for_disk or self._waits_for_memory

    def _close_unfinished(self, journal: Journal) -> None:
        """Close the channels with the most bytes of incoming bodies and open transactions.

        Consumers cannot free these bytes, and publishers that are not read cannot complete them. So half of the limit
        is kept for queues.
        """
        channels = [channel for session in self.sessions for channel in session.channels.values()]
        for channel in sorted(channels, key=lambda channel: channel.unfinished, reverse=True):
            if journal.unfinished <= journal.limit // 2:
                break
            code, size = ReplyCode.RESOURCE_ERROR, channel.unfinished
            _log.warning(
                "%s: the channel is closed: unfinished bodies and transactions take %d bytes, more than half of "
                "memory_limit=%d; this channel has %d bytes of them",
                channel.name,
                journal.unfinished,
                journal.limit,
                size,
            )
            text = (
                f"unfinished bodies and transactions take more than half of memory_limit={journal.limit}; this channel "
                f"has {size} bytes; use smaller ones, or raise memory_limit"
            )
            channel.fail(code, f"{code.title} - {text}")

    def _limit_buffers(self, journal: Journal) -> None:
        """Close the connections with the most unread output or held input, if these take too much memory.

        Output that clients do not read may use only half of the limit, so that it cannot fill memory alone. While
        memory is full, the held input of connections that have not published yet may use 1/32 of the limit.
        `Journal.held` does not count held input: otherwise memory that is full of input which waits would stay full.
        """
        cut: list[Connection] = []
        why = []
        if journal.buffered > journal.limit // 2:
            why.append("output that clients do not read takes more than half of memory_limit")
            for connection in sorted(self.connections, key=lambda connection: connection.unread, reverse=True):
                if journal.buffered <= journal.limit // 8 * 3:
                    break
                cut.append(connection)
                connection.cut()
        if self._waits_for_memory and self.first_publishes > journal.limit // 32:
            why.append("memory is full, and first publishes that wait take more than 1/32 of memory_limit")
            for connection in sorted(self.connections, key=lambda connection: connection.first_publish, reverse=True):
                if self.first_publishes <= journal.limit // 64:
                    break
                cut.append(connection)
                connection.cut()
        now = self.clock()
        if cut and now >= self._log_cut_at:
            self._log_cut_at = now + self.LOG_PERIOD
            text = "%s and %d others are cut: %s (%d bytes)"
            _log.warning(text, cut[0].name, len(cut) - 1, "; ".join(why), journal.limit)

    def _set_ticker(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        self._tick_at = self.host.timers.next_tick
        if self._loop is not None and self._tick_at < math.inf:
            # The loop's clock is coarse. If the loop calls `_tick` slightly too early, `_tick` sets the timer again.
            delay = max(0.0, self._tick_at - self.clock())
            self._ticker = self._loop.call_later(delay, self._tick)

    def _tick(self) -> None:
        try:
            self.host.timers.tick(self.clock())
        except Exception:
            _log.exception("a timer failed; the broker continues")
        self._set_ticker()
        self.touch()


class Connection(asyncio.Protocol):
    """One socket and its session."""

    #: Maximum bytes that wait to be written to a socket. If more bytes wait, the socket is not read.
    MAX_BACKLOG = 8 * 1024 * 1024

    def __init__(self, server: Server) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
        # Whether the socket is read, and whether too many bytes wait to be written to it.
        self._is_reading = True
        self._has_backlog = False
        # Whether the transport's buffer is full, because the client does not read fast enough.
        self._is_slow = False
        # Bytes of this connection that are counted in `Journal.buffered`, and in `Server.first_publishes`.
        self.unread = 0
        self.first_publish = 0
        # Number of bytes that the socket had accepted at the last call of `_look_for_life`.
        self._taken = 0
        # Set when the session has ended, and the transport has all of its output.
        self._is_finished = False
        self.lost: asyncio.Future[None] = self._loop.create_future()
        self.session = Session(
            "?", server.host, server.controls, server.clock(), partial(server.has_output, self), server.discipline
        )

    @property
    def name(self) -> str:
        return self.session.name

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        server = self._server
        peer = transport.get_extra_info("peername")
        self.session.name = f"{peer[0]}:{peer[1]}" if peer else "unknown peer"
        self.session.address = str(peer[0]) if peer else ""
        server.connections[self] = None
        if server.is_stopping:
            self._transport.abort()
            return
        server.add_stranger(self)
        _log.debug("%s: connected", self.session.name)
        self._set_timer()
        server.touch()

    def connection_lost(self, exc: Exception | None) -> None:
        _log.debug("%s: disconnected%s", self.session.name, f": {exc}" if exc else "")
        if self._timer is not None:
            self._timer.cancel()
        self.session.lost()
        self._server.forget(self)
        self._set_buffers(0, 0)
        if self._is_finished:
            self._server.finished -= 1
        self._server.touch()
        self._transport = None
        self.lost.set_result(None)

    def data_received(self, data: bytes) -> None:
        session, now = self.session, self._server.clock()
        until = self._server.slice_end(now, len(data))
        try:
            if until > now:
                session.receive_data(data, now, until)
            else:
                session.hold(data, now)
        except Exception:
            _log.exception("%s: a frame could not be handled; the connection is closed", session.name)
            session.fail_internally(self._server.clock())
        self._server.check_growth()
        if self._server.is_paused and not session.is_paused:
            self.pause(True)
        self._check_timer()
        if session.deadlines.tarpit_until is not None or session.is_held or not self._is_reading:
            self._check_reading()
            self._resume()
            self._count_buffers()
        self._server.touch()

    def output_sent(self) -> None:
        self.session.output.taken()
        self._resume()

    @property
    def _can_go_on(self) -> bool:
        session = self.session
        return session.can_resume and not (self._has_backlog or session.is_paused)

    def _resume(self) -> None:
        """Continue soon with held input, unless the connection waits for the socket, for memory or for the disk."""
        if self._can_go_on:
            self._server.go_on_later(self)

    def go_on(self) -> None:
        """Handle held input, unless the connection has to wait again."""
        if self._can_go_on:
            # The socket was not read while the input was held. So the session could not see heartbeats in this time.
            self.session.deadlines.last_received = self._server.clock()
            self.data_received(b"")

    def pause_writing(self) -> None:
        self._is_slow = True
        self._count_buffers()
        self.session.output.pause()

    def resume_writing(self) -> None:
        self._is_slow = False
        self._count_buffers()
        self._has_backlog = False
        if not self.session.is_publishing:
            # A client that does not publish is paused only while it is slow. Read it now: its acks can free memory.
            self.pause(False)
        self._check_reading()
        self.session.output.resume()
        self._resume()

    def send(self, now: float) -> None:
        transport = self._transport
        data = self.session.take_output(now)
        if transport is None or transport.is_closing() or self._is_finished:
            return
        if data:
            transport.write(data)
            if self._is_slow:
                self._count_buffers()
        self._check_timer()
        if not self._is_reading:
            # If the session is closing now, read the socket, because the answer to Connection.Close has to arrive.
            self._check_reading()
            self._resume()
        if self.session.state is State.ENDED:
            self._finish(transport)
        elif not self._has_backlog and transport.get_write_buffer_size() > self.MAX_BACKLOG:
            self._has_backlog = True
            self._check_reading()

    def _finish(self, transport: asyncio.Transport) -> None:
        """Send nothing more, and discard input until the client closes the connection or the timer calls `abort`.

        If the broker closed the socket while frames of the client are on the way, the kernel would reset the
        connection. The client could then lose the last frames of the broker, such as ``Connection.Close-Ok``.
        """
        server = self._server
        self._is_finished = True
        server.finished += 1
        if self.session.is_unresponsive or server.finished > server.settings.max_connections:
            transport.close()
        else:
            self._check_reading()
            # Some clients wait for the end of the stream. A TLS transport of asyncio cannot close only one direction.
            self._when_quiet(transport.write_eof if transport.can_write_eof() else transport.close)
        time_to_open = max(0.0, self.session.deadlines.open_by - server.clock())
        self.cut_off_after(min(server.settings.close_timeout, time_to_open))

    def close_when_quiet(self) -> None:
        """Close the connection when its client has sent nothing for `Server.QUIET` seconds."""
        if self._transport is not None:
            self._when_quiet(self._transport.close)

    def _when_quiet(self, end: Callable[[], None], received: int | None = None) -> None:
        """Call `end` when the client has sent nothing for `Server.QUIET` seconds.

        `end` closes the connection, or only its sending side.
        If several threads of a client have sent ``Connection.Close``, each of them has to read ``Connection.Close-Ok``
        before the end of the stream. `received` is the number of bytes received at the previous check.
        """
        # If a TLS transport of asyncio is closed twice, it ignores a later `abort`.
        if self._transport is None or self._transport.is_closing():
            return
        count = self.session.bytes_received
        if count != received:
            self._loop.call_later(self._server.QUIET, self._when_quiet, end, count)
            return
        # `end` fails if the peer has reset the connection. The transport then calls `connection_lost`.
        with suppress(OSError):
            end()

    def _check_reading(self) -> None:
        """Start or stop reading the socket. The module's docstring lists the reasons not to read it."""
        session = self.session
        reads = self._is_finished or not (
            self._has_backlog or session.deadlines.tarpit_until is not None or session.is_paused or session.is_held
        )
        if self._transport is not None and reads is not self._is_reading:
            self._is_reading = reads
            if reads:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def _count_buffers(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        session = self.session
        is_first = session.is_paused and not session.channels.published
        self._set_buffers(
            self._transport.get_write_buffer_size() if self._is_slow else 0, session.held_size if is_first else 0
        )

    def _set_buffers(self, unread: int, first_publish: int) -> None:
        server = self._server
        if server.host.journal is not None:
            server.host.journal.buffered += unread - self.unread
        server.first_publishes += first_publish - self.first_publish
        self.unread, self.first_publish = unread, first_publish

    def cut(self) -> None:
        """Close the connection immediately, and no longer count its buffers for the memory limit."""
        self._set_buffers(0, 0)
        self.abort()

    def pause(self, on: bool) -> None:
        """Stop reading the socket, if the client publishes or does not read. With ``on=False``, resume reading."""
        session = self.session
        if on is not session.is_paused and (not on or self._is_slow or session.is_publishing):
            session.is_paused = on
            session.deadlines.last_received = self._server.clock()
            self._check_reading()
            self._count_buffers()
            self._resume()

    def abort(self) -> None:
        """Drop the connection without ``Connection.Close``."""
        if self._transport is not None:
            self._transport.abort()

    def cut_off_after(self, seconds: float) -> None:
        """Drop the connection after this number of seconds, unless it is closed earlier. Unsent output is lost."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self.abort)

    def _check_timer(self) -> None:
        if self.session.deadlines.at < self._timer_at:
            self._set_timer()

    def _look_for_life(self, now: float) -> None:
        """If the socket is not read, count output that the client has accepted since the last call as a heartbeat."""
        if self._transport is None or self._is_reading:
            return
        taken = self.session.output.sent - self._transport.get_write_buffer_size()
        if taken > self._taken:
            self.session.deadlines.last_received = now
        self._taken = taken

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_at = self.session.deadlines.at
        if self._timer_at < float("inf"):
            delay = max(0.0, self._timer_at - self._server.clock())
            self._timer = self._loop.call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        now = self._server.clock()
        self._look_for_life(now)
        self.session.tick(now)
        self._check_reading()
        self._resume()
        if self.session.state is not State.ENDED:
            self._set_timer()
