"""The publishing channel of an `AsyncProducer`, on its own connection of aio-pika or on a shared connection.

`Engine` makes a `Link` for each host that it tries. If the producer's own connection is lost, the link makes a new one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from aiormq import ConnectionClosed
from aiormq.exceptions import ChannelClosed
from yarl import URL

from qflow_client.aio.aiormq_io import TapTransport
from qflow_client.aio.asker import AsyncAsker
from qflow_client.aio.connection import (
    TappedConnection,
    TappedRobustConnection,
    address_of,
    channel_reply,
    final,
    open_connection,
    words,
)
from qflow_client.aio.opening import open_channel
from qflow_client.aio.restoration import Restoration
from qflow_client.amqp import coalescing
from qflow_client.core.protocol import ProducerProtocol
from qflow_client.errors import ConnectionFailed
from qflow_client.guard import LOOPS
from qflow_client.logs import log
from qflow_client.recovery import Reconnection
from qflow_client.redaction import hide_password
from qflow_client.renewal import Answer, Failure
from qflow_client.skin import (
    BRIEF,
    GIVEN_UP,
    GOOD_BYE,
    NOT_CONNECTED,
    client_properties,
    connection_failed,
    log_connected,
    log_failed_try,
    lost,
)
from qflow_client.topology import Topology
from qflow_client.upkeep import Upkeep

__all__ = ["Link"]

# If more bytes than this are unwritten after a read, write them before the tasks that the read has woken add messages.
_ENOUGH = 1 << 13
# The class id and the method id of ``Channel.Open``.
_CHANNEL_OPEN = (20, 10)


class Link:
    """The publishing channel and the producer's own connection, if any. The link replaces them after a loss if it can.

    aio-pika's tasks run the connection, so heartbeats are sent as long as the application does not block the loop.

    Args:
        connection: a shared connection on which to open the channel; ``None`` to make a connection.
        after: called after every event that may have changed the protocol's state.
        topology: the objects to declare each time before the channel is opened; ``None`` for nothing.
        asker: requests the credentials; ``None`` if the URLs contain the credentials, or on a shared connection.
    """

    def __init__(
        self,
        reconnection: Reconnection,
        connection: TappedConnection | TappedRobustConnection | None,
        protocol: ProducerProtocol,
        after: Callable[[], None],
        topology: Topology | None = None,
        asker: AsyncAsker | None = None,
    ) -> None:
        self._topology = topology
        self._connection: Any = connection
        self._is_own = connection is None
        self._settings = protocol.settings
        self._reconnection = reconnection
        # Why this link itself ends the open connection, see `_leave_host`; otherwise empty.
        self._leaves_because = ""
        self._protocol = protocol
        self._after = after
        self._loop = asyncio.get_running_loop()
        later, post = self._loop.call_later, self._post
        self._upkeep = Upkeep(reconnection, protocol, LOOPS, later, post, self._leave_host, asker)
        # The transport of the newest connection; ``None`` before the channel is open for the first time.
        self.writer: TapTransport | None = None
        # aiormq's newest connection and channel; ``None`` before the channel is open for the first time.
        self._amqp: Any = None
        self._channel: Any = None
        # Done when the newest connection of aiormq has ended; ``None`` before the channel is open for the first time.
        self._amqp_closing: asyncio.Future[Any] | None = None
        # The number of the channel while it is attached to the tap; otherwise ``None``.
        self._number: int | None = None
        # Done when the partly written message is complete; ``None`` while `close` does not wait for this message.
        self._ended: asyncio.Future[None] | None = None
        # The task that closes the producer's own connection or the channel; ``None`` before this task begins.
        self._closing: asyncio.Task[None] | None = None
        # The newest task that connects again or opens another channel; ``None`` before the first task.
        self._returning: asyncio.Task[None] | None = None
        # Waits until aio-pika restores a lost shared connection; ``None`` if aio-pika does not restore it.
        self._restoration: Restoration | None = None
        if isinstance(connection, TappedRobustConnection):
            limit = self._settings.reconnect_timeout
            self._restoration = Restoration(connection, limit, self._on_restored, self._give_up)
        # The time at which the timer fires, in seconds of `time.monotonic`; ``None`` without a timer.
        self._timer_at: float | None = None
        # The timer for the next `on_timer` of the protocol; ``None`` without a timer.
        self._timer: asyncio.TimerHandle | None = None

    def _delay(self, size: int) -> float:
        # Half of the delay, because event loops round up to whole milliseconds.
        return coalescing.delay(size, self._protocol.in_flight) / 2

    @property
    def url(self) -> str:
        """The URL of the host, with its password."""
        return self._reconnection.host_url if self._is_own else str(self._connection.url)

    @property
    def last_failure(self) -> str:
        """Why the last finished attempt to connect failed; empty if it succeeded, or if none has finished."""
        return self._reconnection.last

    def _post(self, function: Callable[[], object]) -> None:
        # If the loop is closed, `call_soon_threadsafe` raises RuntimeError, and the call is not needed.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)

    async def open(self) -> None:
        """Connect and open the channel. With the setting `connect_in_background`, only start to connect.

        A shared connection is already open, so the setting has no effect on it.

        Raises:
            ConnectionFailed: connecting failed; the text gives the reason.
        """
        if self._is_own and self._settings.connect_in_background:
            now = time.monotonic()
            self._reconnection.lost(NOT_CONNECTED, now)
            LOOPS.take(lambda: self._protocol.start_in_background(now))
            self._returning = self._loop.create_task(self._open_again(0.0))
        else:
            await self._open()

    async def _open(self) -> None:
        timeout = self._settings.connect_timeout
        limit = asyncio.timeout(timeout)
        try:
            async with limit:
                if self._is_own:
                    address = await self._address()
                    properties = client_properties(self._settings.name)
                    order = self._reconnection.addresses
                    connection = TappedConnection(address, client_properties=properties, order_addresses=order)
                    await open_connection(connection, self.url)
                    self._connection = connection
                await self._open_channel()
        except GeneratorExit:
            # After a GeneratorExit the loop does not run, so do not wait.
            if self._is_own and self._connection is not None:
                _cut(self._connection)
            raise
        except BaseException as error:
            why = self._upkeep.too_late(timeout)
            self._upkeep.end()
            if self._is_own and self._connection is not None:
                await self._end(BRIEF)
                self._connection = self._closing = None
            if isinstance(error, TimeoutError) and limit.expired():
                raise connection_failed(self.url, why) from None
            raise

    async def _address(self) -> URL:
        address = address_of(self.url, {})
        if self._upkeep.renewer is None:
            return address
        asked: asyncio.Future[Answer] = self._loop.create_future()
        self._upkeep.renewer.log_in(lambda answer: None if asked.done() else asked.set_result(answer))
        answer = await asked
        if isinstance(answer, Failure):
            raise connection_failed(self.url, answer.why)
        return address.with_user(answer.username or None).with_password(answer.password)

    async def _open_again(self, pause: float) -> None:
        """Try to connect and to open the channel, until an attempt succeeds or no further attempt is allowed."""
        reconnection = self._reconnection
        lost_one, self._connection = self._connection, None
        try:
            if lost_one is not None:
                # Close the lost connection now, because aio-pika may otherwise close it at any later time.
                await asyncio.wait((self._loop.create_task(_close_connection(lost_one)),), timeout=BRIEF)
            while True:
                await asyncio.sleep(pause)
                host = hide_password(self.url)
                try:
                    await self._open()
                    break
                except ConnectionFailed as error:
                    why = str(error).removeprefix(f"{host}: ")
                    again = reconnection.failed(why, final(error.__cause__), time.monotonic())
                if again is None:
                    self._give_up(reconnection.verdict)
                    return
                pause = again
                log_failed_try(self._settings.name, host, why, pause)
            reconnection.opened(time.monotonic())
            log_connected(self._settings.name, host, reconnection.verdict)
        except BaseException as error:
            self._give_up(f"{reconnection.verdict}; reconnecting was stopped: {words(error)}")
            raise

    async def _reopen(self) -> None:
        """Open the channel again, because aio-pika has restored the shared connection."""
        try:
            await self._open()
        except ConnectionFailed as error:
            if self._connection.connected.is_set():
                # As long as this connection is open, a further attempt would fail with the same error.
                self._give_up(
                    f"{self._reconnection.verdict}; it was restored, but its channel could not be opened: {error}"
                )
        else:
            log_connected(self._settings.name, hide_password(self.url), self._reconnection.verdict)

    async def _open_channel_again(self, pause: float) -> None:
        """Open another channel, because the broker has closed the channel but not the connection."""
        why = ""
        while not why:
            await asyncio.sleep(pause)
            try:
                async with asyncio.timeout(self._settings.connect_timeout):
                    await self._open_channel()
                return
            except (ConnectionFailed, TimeoutError) as error:
                if self._is_own or self._amqp.is_closed:
                    why = lost(words(error))
                pause = self._reconnection.channel_closed(self._protocol.settled_so_far, time.monotonic())
        if self._is_own:
            _cut(self._connection)
        self._lost(why, returns=self._comes_back)

    def _give_up(self, reason: str) -> None:
        if self._restoration is not None:
            self._restoration.end()
        LOOPS.take(lambda: self._protocol.connection_lost(reason, time.monotonic()))
        self._after()

    async def _open_channel(self) -> None:
        transport, tapped = self._connection.transport, self._connection.tapped
        if transport is None or tapped is None or transport.connection.is_closed:
            raise connection_failed(self.url, "the connection is not open")
        amqp = transport.connection
        channel, number = await open_channel(amqp, tapped.tap, self._settings, self._topology, self.url)
        if amqp is not self._amqp:
            self._amqp_closing = amqp.closing
            self._amqp_closing.add_done_callback(self._on_close)
        self.writer, self._amqp, self._channel, self._number = tapped, amqp, channel, number
        now = time.monotonic()
        tapped.tap.heartbeat = float(amqp.heartbeat_timeout)
        tapped.tap.frame_max = amqp.connection_tune.frame_max

        def opened() -> None:
            self._protocol.channel_opened(number, amqp.connection_tune.frame_max, now)
            tapped.tap.attach(number, self._protocol, now)
            if self._protocol.admission.observer is not None:
                self._protocol.admission.observer.peer = tapped.peer

        LOOPS.take(opened)
        tapped.add_after(self._after_io)
        if self._is_own:
            tapped.delay = self._delay
            self._upkeep.begin(tapped.tap, tapped.pump, tapped.get_extra_info("socket"), now)
        channel.closing.add_done_callback(self._on_channel_close)
        if self._restoration is not None:
            self._restoration.end()
        self._after_io()
        tapped.pump()

    async def close(self, patience: float) -> None:
        """Settle all unsettled messages. Close the channel, and the connection if the producer owns it.

        A cancelled call also settles all messages, and aborts the producer's own connection.

        Args:
            patience: the longest wait for the broker's answer in seconds.
        """
        try:
            await self._close(patience)
        finally:
            self._leave(GIVEN_UP)
            if self._amqp_closing is not None:
                # A shared connection would keep this link in memory until its end.
                self._amqp_closing.remove_done_callback(self._on_close)
            if self._protocol.wants_channel:
                # The channel was lost, and no new channel is open yet.
                self._give_up(GIVEN_UP)

    async def _close(self, patience: float) -> None:
        if self._restoration is not None:
            self._restoration.forget()
        if self._loop.is_closed():
            # The tasks of aio-pika never run again in the closed loop, so do not wait for them.
            return
        if self._returning is not None and not self._returning.done():
            self._returning.cancel()
            await asyncio.wait((self._returning,), timeout=BRIEF)
        if self._is_own:
            if self._connection is not None:
                await self._end(patience)
            return
        until = self._loop.time() + patience
        channel = self._channel if self._number is not None else None
        if channel is not None and not await self._end_message(until + BRIEF):
            # Send no close, because AMQP forbids a close inside a message, and the broker would end the connection.
            log(
                logging.WARNING,
                "%s: channel %d is left open, because a message on it is partly written and the broker does not read "
                "the rest",
                self._settings.name,
                self._number,
            )
            channel = None
        self._leave(GIVEN_UP)
        if channel is not None:
            # If the broker answers after this wait, the task still handles the answer.
            self._closing = self._loop.create_task(_close_channel(channel))
            await asyncio.wait((self._closing,), timeout=max(BRIEF, until - self._loop.time()))

    async def _end_message(self, until: float) -> bool:
        """Write the rest of the partly written message, but no other message. Return False at the deadline `until`."""
        if self._message_ended():
            return True
        self._ended = self._loop.create_future()
        assert self.writer is not None
        self.writer.pump()
        try:
            async with asyncio.timeout_at(until):
                await self._ended
        except TimeoutError:
            return False
        finally:
            self._ended = None
        return True

    def _message_ended(self) -> bool:
        return LOOPS.take(self._protocol.end_writing)

    async def _end(self, patience: float) -> None:
        """End the producer's own connection. Abort it if the broker does not answer in time."""
        closing = self._begin_end()
        self._leave(GIVEN_UP)
        try:
            await asyncio.wait((closing,), timeout=patience)
        except asyncio.CancelledError:
            await asyncio.wait((closing,), timeout=BRIEF)
            raise
        finally:
            _cut(self._connection)
            # After the abort, aio-pika's tasks end without the broker's answer. Wait for them here. Otherwise the
            # loop's end would cancel them while they wait for each other.
            await asyncio.wait((closing,), timeout=BRIEF)

    def _begin_end(self) -> asyncio.Task[None]:
        connection = self._connection
        tapped = connection.tapped
        # Abort if the broker blocks the connection or has stopped reading, because it would not read a close.
        if tapped is not None and (tapped.tap.is_blocked or tapped.full):
            tapped.abort()
        # If `_on_channel_close` has already begun to close the connection, the task exists.
        if self._closing is None:
            self._closing = self._loop.create_task(_close_connection(connection))
            timer = self._loop.call_later(GOOD_BYE, _cut, connection)

            def ended(_: object) -> None:
                timer.cancel()
                # Do not rely on aiormq to close the socket.
                _cut(connection)

            self._closing.add_done_callback(ended)
        return self._closing

    def arm_timer(self) -> None:
        now = time.monotonic()
        at = LOOPS.take(lambda: self._protocol.next_timer(now))
        if at is not None and (self._timer_at is None or at < self._timer_at):
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = at
            self._timer = self._loop.call_later(max(0.0, at - now), self._on_timer)

    def _on_timer(self) -> None:
        self._timer_at = self._timer = None
        LOOPS.take(lambda: self._protocol.on_timer(time.monotonic()))
        self._after_io()
        if self.writer is not None:
            self.writer.pump()

    def _leave_host(self, why: str) -> None:
        """End the open connection in order to connect again."""
        if self._closing is None:
            self._leaves_because = why
            _cut(self._connection)

    def _on_channel_close(self, closing: asyncio.Future[Any]) -> None:
        if self._amqp.is_closed:
            # The connection has ended too, and `_on_close` reports the reason.
            return
        error = _error(closing)
        if isinstance(error, ChannelClosed) and self._protocol.channel.number is not None:
            # The broker closed the channel before the tap passed its frames to the protocol. No message is the cause.
            code, text = channel_reply(error)
            LOOPS.take(lambda: self._protocol.channel_closed(code, text, _CHANNEL_OPEN, time.monotonic()))
        # If the broker closed the channel, the tap has already reported the close, and the protocol's channel has no
        # number. If there is no error, the loop is ending and has cancelled aiormq's tasks.
        by_broker = error is not None and self._protocol.channel.number is None
        self._leave("the channel was closed" if error is None else f"the channel was closed: {words(error)}")
        if self._closing is not None:
            return
        if by_broker and self._protocol.wants_channel:
            pause = self._reconnection.channel_closed(self._protocol.settled_so_far, time.monotonic())
            self._returning = self._loop.create_task(self._open_channel_again(pause))
        elif self._is_own:
            # Close the connection too, because only this channel uses it.
            if error is None:
                # The loop is ending, so a new task would not run.
                _cut(self._connection)
            else:
                self._begin_end()

    def _on_close(self, closing: asyncio.Future[Any]) -> None:
        if self._number is None:
            # Either the producer has ended the connection, or `_open_channel_again` runs, and will notice the loss.
            return
        why, self._leaves_because = self._leaves_because, ""
        returns = True
        if not why:
            why, returns = _why_closed(self._amqp, closing, close_called=self._connection.close_called)
        self._lost(lost(why), returns=returns and self._comes_back)

    @property
    def _comes_back(self) -> bool:
        """Whether a lost connection is replaced. Only aio-pika can restore a shared connection."""
        return self._closing is None if self._is_own else self._restoration is not None

    def _lost(self, why: str, *, returns: bool) -> None:
        pause = self._reconnection.lost(why, time.monotonic()) if returns else None
        wanted = self._leave(why, reconnects=pause is not None)
        if pause is None:
            # If the channel was not open, `_leave` has not reported the loss.
            self._give_up(why)
        elif not wanted:
            return
        elif self._is_own:
            self._returning = self._loop.create_task(self._open_again(pause))
        else:
            assert self._restoration is not None
            self._restoration.begin(why)

    def _on_restored(self) -> None:
        if self._number is None and (self._returning is None or self._returning.done()):
            self._returning = self._loop.create_task(self._reopen())

    def _leave(self, reason: str, *, reconnects: bool = False) -> bool:
        """Detach the channel from the tap, and report its loss. Return True if the producer wants a new connection."""
        number, self._number = self._number, None
        tapped = self.writer
        if number is not None and tapped is not None:
            tapped.tap.detach(number)
            tapped.delay = None
            self._upkeep.end()
        wanted = False
        # If the broker closed the channel, the tap has already reported the close, and `channel.number` is ``None``.
        if reconnects or self._protocol.channel.number is not None:
            now = time.monotonic()
            shared = not self._is_own
            wanted = LOOPS.take(
                lambda: self._protocol.connection_lost(reason, now, reconnects=reconnects, shared=shared)
            )
        if number is not None and tapped is not None:
            self._after_io()
            tapped.remove_after(self._after_io)
            # If a frame is partly written, write the rest of the frame.
            tapped.pump()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = self._timer_at = None
        if wanted and self._protocol.needs_timer:
            self.arm_timer()
        return wanted

    def _after_io(self) -> bool:
        """Call `after`, which may wake tasks. Return True if the output must be written before these tasks run."""
        self._after()
        if self._protocol.needs_timer:
            self.arm_timer()
        if self._ended is not None and not self._ended.done() and self._message_ended():
            self._ended.set_result(None)
        protocol = self._protocol
        # Write the answer to a stop (``Channel.Flow``) at once, and the answer to a restart with the waiting messages.
        return protocol.unwritten > _ENOUGH or (protocol.is_stopped and protocol.has_answer)


def _cut(connection: Any) -> None:
    if connection.tapped is not None:
        connection.tapped.abort()


async def _close_channel(channel: Any) -> None:
    with suppress(Exception):
        await channel.close()


async def _close_connection(connection: Any) -> None:
    """Close a connection with AMQP's closing handshake.

    aio-pika's own `close` waits until its task for close callbacks sets an event, even if `close` is cancelled. If
    `asyncio.run` cancels that task before it begins, the wait never ends. So this function first closes aiormq's
    connection itself. Then aio-pika's `close` has nothing to wait for.
    """
    transport, connection.transport = connection.transport, None
    try:
        if transport is not None:
            with suppress(Exception):
                await transport.connection.close(ConnectionClosed)
            await transport.close_callback.wait()
    finally:
        await connection.close()


def _why_closed(amqp: Any, closing: asyncio.Future[Any], *, close_called: bool) -> tuple[str, bool]:
    """Return why a connection has ended, and whether the broker or the network has ended it."""
    interval = amqp.heartbeat_timeout
    if interval > 0 and amqp.is_connection_was_stuck:
        return f"the broker sent nothing, not even heartbeats, at a heartbeat interval of {interval} s", True
    error = _error(closing)
    if error is not None:
        return words(error), True
    # aiormq reports no error if it notices the end of the data before it waits for the next frame.
    if not closing.cancelled() and closing.exception() is None and not close_called:
        return "the broker closed the socket", True
    # The application has closed the connection. Or the loop is ending, and has cancelled aiormq's tasks.
    return "it was closed", False


def _error(closing: asyncio.Future[Any]) -> BaseException | None:
    """Return the error that ended a channel or connection; ``None`` if it was closed or cancelled without an error."""
    error = None if closing.cancelled() else closing.exception()
    return None if isinstance(error, asyncio.CancelledError) else error
