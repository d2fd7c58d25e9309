"""The publishing channel on connections of aio-pika's, with the tap at their sockets."""

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
from qflow_client.amqp import coalescing
from qflow_client.core.protocol import ProducerProtocol
from qflow_client.errors import ConnectionFailed
from qflow_client.guard import LOOPS
from qflow_client.logs import log
from qflow_client.recovery import Reconnection, Watch
from qflow_client.redaction import hide_password
from qflow_client.renewal import Answer, Failure, Renewer
from qflow_client.returning import Returner
from qflow_client.skin import (
    BRIEF,
    GIVEN_UP,
    GOOD_BYE,
    NOT_CONNECTED,
    client_properties,
    connection_failed,
    log_connected_again,
    log_failed_try,
    lost,
    no_answer,
    no_confirms,
)
from qflow_client.topology import Topology

__all__ = ["Link"]

# So many bytes are worth a write of their own.
_ENOUGH = 1 << 13

# AMQP has no more channels on a connection.
_CHANNEL_MAX = 65535


class Link:
    """The publishing channel, and the connection if it is the producer's own; one after the other as they are lost.

    aio-pika's tasks run the connection, so heartbeats go on as long as the application lets the loop turn.

    Args:
        reconnection: says which host to connect to.
        connection: on which to open the channel; ``None`` to make one.
        protocol: the producer's state.
        after: called after anything that may have changed the protocol.
        topology: what is declared on each connection of our own; ``None`` for nothing.
        asker: asks for what to log in with; ``None`` if the URLs say it, or on a connection that others use.
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
        self._watch = Watch(self._settings, reconnection.hosts)
        # The next look of the watch; None while there is no connection of our own.
        self._next_look: asyncio.TimerHandle | None = None
        # Why we leave the connection that is open; empty while we do not.
        self._leaves_because = ""
        self._protocol = protocol
        self._after = after
        self._loop = asyncio.get_running_loop()
        # Gets the credentials of the connections; None if they are in the URL.
        self._renewer: Renewer | None = None
        later, post = self._loop.call_later, self._post
        self._returner = Returner(reconnection, self._settings, later, post, self._leave_host)
        if asker is not None:
            self._renewer = Renewer(asker, self._settings, later, post, self._update_secret, self._leave_host)
        # The connection's socket; set once the channel is there.
        self.tapped: TapTransport | None = None
        # aiormq's objects, likewise.
        self._amqp: Any = None
        self._channel: Any = None
        # The channel's number while the tap knows the channel.
        self._number: int | None = None
        # Set once the message that has begun has ended, if `close` waits for that.
        self._ended: asyncio.Future[None] | None = None
        # The end of the connection that is our own, or of the channel; None until it has begun.
        self._closing: asyncio.Task[None] | None = None
        # What connects again, or opens a channel on a connection that has; None while nothing does.
        self._returning: asyncio.Task[None] | None = None
        # The end of a shared connection that is lost and may come back, and of the time that it has for that.
        self._owner_closes: asyncio.Future[Any] | None = None
        self._time_limit: asyncio.TimerHandle | None = None
        # When the timer that is armed fires, and the timer; None if none is.
        self._timer_at: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def _delay(self, size: int) -> float:
        # Event loops round up to whole milliseconds.
        return coalescing.delay(size, self._protocol.in_flight) / 2

    @property
    def url(self) -> str:
        """The host."""
        return self._reconnection.host_url if self._is_own else str(self._connection.url)

    @property
    def last_failure(self) -> str:
        """Why the last try to connect failed; empty if none has since there was a connection."""
        return self._reconnection.last

    def _post(self, function: Callable[[], object]) -> None:
        # A loop that is closed has nothing to connect.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)

    async def open(self) -> None:
        """Connect and open the channel, or with `connect_in_background` begin to.

        Raises:
            ConnectionFailed: it cannot be had, and why.
        """
        if self._is_own and self._settings.connect_in_background:
            self._reconnection.lost(NOT_CONNECTED, time.monotonic())
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
            # The loop is gone, so nothing can be waited for.
            if self._is_own and self._connection is not None:
                _cut(self._connection)
            raise
        except BaseException as error:
            self._end_renewal()
            if self._is_own and self._connection is not None:
                await self._end(BRIEF)
                self._connection = self._closing = None
            if isinstance(error, TimeoutError) and limit.expired():
                raise no_answer(self.url, timeout) from None
            raise

    async def _address(self) -> URL:
        """Where to connect, with what to log in with."""
        address = address_of(self.url, {})
        if self._renewer is None:
            return address
        asked: asyncio.Future[Answer] = self._loop.create_future()
        self._renewer.log_in(lambda answer: None if asked.done() else asked.set_result(answer))
        answer = await asked
        if isinstance(answer, Failure):
            raise self._failed(answer.why)
        return address.with_user(answer.username or None).with_password(answer.password)

    async def _open_again(self, pause: float) -> None:
        """Connect and open the channel as soon as any host lets us."""
        reconnection = self._reconnection
        lost_one, self._connection = self._connection, None
        try:
            if lost_one is not None:
                # aio-pika closes what it finds open at any later time.
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
            log_connected_again(self._settings.name, host)
        except BaseException as error:
            self._give_up(f"{reconnection.verdict}; what connects again was ended: {words(error)}")
            raise

    async def _reopen(self) -> None:
        """Open the channel on the shared connection, which is back."""
        try:
            await self._open()
        except ConnectionFailed as error:
            if self._connection.connected.is_set():
                # It will not get better before the connection is lost once more.
                self._give_up(f"{self._reconnection.verdict}; it is back, but not the channel: {error}")
        else:
            log_connected_again(self._settings.name, hide_password(self.url))

    async def _open_channel_again(self, pause: float) -> None:
        """Open the channel anew on a connection whose last one the broker has closed."""
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
        self._stop_waiting()
        LOOPS.take(lambda: self._protocol.connection_lost(reason, time.monotonic()))
        self._after()

    def _stop_waiting(self) -> None:
        if self._owner_closes is not None:
            self._owner_closes.cancel()
            self._owner_closes = None
        if self._time_limit is not None:
            self._time_limit.cancel()
            self._time_limit = None

    async def _open_channel(self) -> None:
        transport, tapped = self._connection.transport, self._connection.tapped
        if transport is None or tapped is None or transport.connection.is_closed:
            raise self._failed("the connection is not open")
        amqp = transport.connection
        settings = self._settings
        if settings.confirms and not _confirms(amqp):
            raise self._failed(no_confirms("the broker does not announce them"))
        if self._topology is not None:
            try:
                await self._declare(amqp, self._topology)
            except ConnectionFailed:
                raise
            except Exception as error:
                # The connection may end in the middle of it.
                raise self._failed(words(error)) from error
        number = self._free_number(amqp)
        tapped.tap.expect(number)
        try:
            channel = await amqp.channel(channel_number=number, publisher_confirms=settings.confirms)
            if channel.is_closed or amqp.is_closed:
                raise self._failed("the channel was closed at once")
        except BaseException as error:
            tapped.tap.detach(number)
            if isinstance(error, ConnectionFailed) or not isinstance(error, Exception):
                raise
            raise self._failed(words(error)) from error
        if amqp is not self._amqp:
            amqp.closing.add_done_callback(self._on_close)
        self.tapped, self._amqp, self._channel, self._number = tapped, amqp, channel, number
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
            self._watch.opened(now)
            self._look_later()
            self._returner.begin()
            if self._renewer is not None:
                self._renewer.begin()
        channel.closing.add_done_callback(self._on_channel_close)
        self._stop_waiting()
        self._after_io()
        tapped.pump()

    async def _declare(self, amqp: Any, topology: Topology) -> None:
        channel = await amqp.channel(publisher_confirms=False)
        for declaration in topology.declarations():
            try:
                await getattr(channel, declaration.method)(**declaration.arguments)
            except ChannelClosed as error:
                if not declaration.accepts(channel_reply(error)[0]):
                    raise self._failed(declaration.refusal("{} {}".format(*channel_reply(error)))) from error
                channel = await amqp.channel(publisher_confirms=False)
        await channel.close()

    def _free_number(self, amqp: Any) -> int:
        """A channel number. aiormq would choose one itself, and the tap has to know it before the channel opens."""
        taken = amqp.channels
        highest = amqp.connection_tune.channel_max or _CHANNEL_MAX
        number = max(taken, default=0) + 1
        if number > highest:
            number = next((each for each in range(1, highest + 1) if each not in taken), 0)
        if not number:
            raise self._failed(f"all {highest} channels that the broker allows on a connection are in use")
        return int(number)

    def _failed(self, why: str) -> ConnectionFailed:
        return connection_failed(self.url, why)

    async def close(self, patience: float) -> None:
        """Give up what is unsettled, and end the channel, and the connection if it is our own.

        If it is cancelled, what is unsettled is given up all the same, and a connection of our own is cut.

        Args:
            patience: seconds that the broker may take to answer.
        """
        try:
            await self._close(patience)
        finally:
            self._leave(GIVEN_UP)
            if self._protocol.wants_channel:
                # The channel was lost, and no other was there yet.
                self._give_up(GIVEN_UP)

    async def _close(self, patience: float) -> None:
        self._stop_waiting()
        if self._loop.is_closed():
            # The loop of the connection has ended, so the library's tasks on it never run again.
            return
        if isinstance(self._connection, TappedRobustConnection):
            self._connection.reconnect_callbacks.discard(self._on_reconnected)
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
            # The broker would take the close for a part of the message, and end the connection for it.
            log(
                logging.WARNING,
                "%s: channel %d is left open, because a message on it has begun and the broker does not take the rest",
                self._settings.name,
                self._number,
            )
            channel = None
        self._leave(GIVEN_UP)
        if channel is not None:
            # A broker that answers later is heard all the same.
            self._closing = self._loop.create_task(_close_channel(channel))
            await asyncio.wait((self._closing,), timeout=max(BRIEF, until - self._loop.time()))

    async def _end_message(self, until: float) -> bool:
        """Write the rest of the message that has begun and nothing more; whether that was possible."""
        if self._message_ended():
            return True
        self._ended = self._loop.create_future()
        assert self.tapped is not None
        self.tapped.pump()
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
        """End the connection that is our own: in order if the broker answers in time, otherwise cut it."""
        closing = self._begin_end()
        self._leave(GIVEN_UP)
        try:
            await asyncio.wait((closing,), timeout=patience)
        except asyncio.CancelledError:
            await asyncio.wait((closing,), timeout=BRIEF)
            raise
        finally:
            _cut(self._connection)
            # The library's tasks end without an answer of the broker now. An event loop that is closed in the middle of
            # that would cancel them where they wait for each other.
            await asyncio.wait((closing,), timeout=BRIEF)

    def _begin_end(self) -> asyncio.Task[None]:
        connection = self._connection
        tapped = connection.tapped
        # A broker that blocks the connection, or does not read, reads no good-bye.
        if tapped is not None and (tapped.tap.is_blocked or tapped.full):
            tapped.abort()
        # It may have begun with the end of the channel.
        if self._closing is None:
            self._closing = self._loop.create_task(_close_connection(connection))
            timer = self._loop.call_later(GOOD_BYE, _cut, connection)

            def ended(_: object) -> None:
                timer.cancel()
                # aiormq is not relied upon to close the socket.
                _cut(connection)

            self._closing.add_done_callback(ended)
        return self._closing

    def arm_timer(self) -> None:
        """Have the protocol told when its time comes."""
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
        if self.tapped is not None:
            self.tapped.pump()

    def _look_later(self) -> None:
        if self._watch.period is not None:
            self._next_look = self._loop.call_later(self._watch.period, self._look_at_broker)

    def _look_at_broker(self) -> None:
        """Leave the connection if the broker is silent, or blocks it for too long."""
        number, tapped, protocol = self._number, self.tapped, self._protocol
        if number is None or tapped is None:
            return
        tap = tapped.tap

        def look() -> str | None:
            why = self._watch.look(
                time.monotonic(),
                heard_at=tap.heard_at,
                is_due=protocol.in_flight > 0,
                is_blocked=tap.is_blocked,
                settled=protocol.settled_so_far,
            )
            if why == "" and not tap.is_probed(number):
                protocol.put_control(tap.probe(number))
            return why

        why = LOOPS.take(look)
        if why and self._closing is None:
            self._reconnection.move_on()
            self._leave_host(why)
            return
        self._look_later()
        tapped.pump()

    def _leave_host(self, why: str) -> None:
        """End a connection that is open, to connect again."""
        if self._closing is None:
            self._leaves_because = why
            _cut(self._connection)

    def _update_secret(self, secret: str, done: Callable[[], object]) -> bool:
        tapped = self.tapped
        if self._number is None or tapped is None:
            return False
        tap = tapped.tap
        LOOPS.take(lambda: self._protocol.put_control(tap.update_secret(secret, lambda: self._loop.call_soon(done))))
        tapped.pump()
        return True

    def _end_renewal(self) -> None:
        if self._renewer is not None:
            self._renewer.end()

    def _on_channel_close(self, closing: asyncio.Future[Any]) -> None:
        if self._amqp.is_closed:
            # `_on_close` says why.
            return
        error = _error(closing)
        # The tap tells of what the broker closes. Otherwise aiormq's tasks are cancelled: the loop ends.
        by_broker = error is not None and self._protocol.channel.number is None
        self._leave("the channel was closed" if error is None else f"the channel was closed: {words(error)}")
        if self._closing is not None:
            return
        if by_broker and self._protocol.wants_channel:
            pause = self._reconnection.channel_closed(self._protocol.settled_so_far, time.monotonic())
            self._returning = self._loop.create_task(self._open_channel_again(pause))
        elif self._is_own:
            # Nothing else is on this connection.
            if error is None:
                # Nothing new may be started.
                _cut(self._connection)
            else:
                self._begin_end()

    def _on_close(self, closing: asyncio.Future[Any]) -> None:
        if self._number is None:
            # We left it.
            return
        error = _error(closing)
        left, self._leaves_because = self._leaves_because, ""
        stuck = self._amqp.heartbeat_timeout > 0 and self._amqp.is_connection_was_stuck
        if left:
            why = lost(left)
        elif stuck:
            why = lost(f"no heartbeat came, nor anything else, at a heartbeat of {self._amqp.heartbeat_timeout} s")
        else:
            why = lost("it was closed" if error is None else words(error))
        # A loop that ends cancels aiormq's tasks; so does aiormq itself when it hears nothing.
        self._lost(why, returns=(bool(left) or stuck or error is not None) and self._comes_back)

    @property
    def _comes_back(self) -> bool:
        """Whether there is another connection after this one: a shared one comes back as aio-pika has it, or never."""
        return self._closing is None if self._is_own else isinstance(self._connection, TappedRobustConnection)

    def _lost(self, why: str, *, returns: bool) -> None:
        pause = self._reconnection.lost(why, time.monotonic()) if returns else None
        wanted = self._leave(why, reconnects=pause is not None)
        if pause is None:
            # Also where the channel was not there.
            self._give_up(why)
        elif not wanted:
            return
        elif self._is_own:
            self._returning = self._loop.create_task(self._open_again(pause))
        else:
            self._connection.reconnect_callbacks.add(self._on_reconnected)
            self._owner_closes = asyncio.ensure_future(self._connection.closed())
            self._owner_closes.add_done_callback(self._on_owner_close)
            limit = self._settings.reconnect_timeout
            if limit is not None:
                why += f"; it did not come back within {limit:.3g} s"
                self._time_limit = self._loop.call_later(limit, self._give_up, why)

    def _on_reconnected(self, *_: Any) -> None:
        if self._number is None and (self._returning is None or self._returning.done()):
            self._returning = self._loop.create_task(self._reopen())

    def _on_owner_close(self, closed: asyncio.Future[Any]) -> None:
        if not closed.cancelled():
            self._give_up(f"{self._reconnection.verdict}; then it was closed")

    def _leave(self, reason: str, *, reconnects: bool = False) -> bool:
        """The channel is no longer ours; whether another connection is wanted."""
        number, self._number = self._number, None
        tapped = self.tapped
        if number is not None and tapped is not None:
            tapped.tap.detach(number)
            tapped.delay = None
            self._end_renewal()
            self._returner.end()
            if self._next_look is not None:
                self._next_look.cancel()
                self._next_look = None
        wanted = False
        # If the broker closed the channel the tap has told of it.
        if reconnects or self._protocol.channel.number is not None:
            now = time.monotonic()
            shared = not self._is_own
            wanted = LOOPS.take(
                lambda: self._protocol.connection_lost(reason, now, reconnects=reconnects, shared=shared)
            )
        if number is not None and tapped is not None:
            self._after_io()
            tapped.remove_after(self._after_io)
            # The end of a frame that has begun.
            tapped.pump()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = self._timer_at = None
        if wanted and self._protocol.needs_timer:
            self.arm_timer()
        return wanted

    def _after_io(self) -> bool:
        """Whether what there is to write must not wait for the tasks that are woken now."""
        self._after()
        if self._protocol.needs_timer:
            self.arm_timer()
        if self._ended is not None and not self._ended.done() and self._message_ended():
            self._ended.set_result(None)
        protocol = self._protocol
        # A stop is answered at once, and a go-ahead lets out at once who has waited for it.
        return protocol.unwritten > _ENOUGH or (protocol.is_stopped and protocol.has_answer)


def _cut(connection: Any) -> None:
    if connection.tapped is not None:
        connection.tapped.abort()


async def _close_channel(channel: Any) -> None:
    with suppress(Exception):
        await channel.close()


async def _close_connection(connection: Any) -> None:
    """Close a connection in order.

    When aio-pika's own `close` is cancelled, it still waits for the task that runs the close callbacks. If that task
    was cancelled as well before it began, as at the end of `asyncio.run`, the wait never ends. So this closes aiormq's
    connection itself, and gives aio-pika's `close` nothing to wait for.
    """
    transport, connection.transport = connection.transport, None
    try:
        if transport is not None:
            with suppress(Exception):
                await transport.connection.close(ConnectionClosed)
            await transport.close_callback.wait()
    finally:
        await connection.close()


def _error(closing: asyncio.Future[Any]) -> BaseException | None:
    """What ended it; ``None`` if that was the application."""
    error = None if closing.cancelled() else closing.exception()
    return None if isinstance(error, asyncio.CancelledError) else error


def _confirms(amqp: Any) -> bool:
    try:
        return bool(amqp.publisher_confirms)
    except (KeyError, TypeError):
        # A broker that announces nothing at all.
        return False
