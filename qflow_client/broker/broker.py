"""The broker with all its rooms: policies, the message store and HTTP, plugged into the core as the settings ask.

The store and HTTP are imported by name when a setting asks for them: they need packages of an extra, or SQLite, and the
broker has to work without.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import closing
from importlib import import_module
from typing import Unpack

from qflow_client.broker.core.broker import Broker as CoreBroker
from qflow_client.broker.core.broker import url_host
from qflow_client.broker.core.channelflow import ChannelFlow
from qflow_client.broker.core.session import State
from qflow_client.broker.core.snapshots import (
    BindingSnapshot,
    ChannelSnapshot,
    ConnectionSnapshot,
    ExchangeSnapshot,
    MemorySnapshot,
    QueueSnapshot,
    binding_snapshots,
    channel_snapshot,
    connection_snapshot,
    exchange_snapshot,
    queue_snapshot,
)
from qflow_client.broker.policies.definitions import (
    Definitions,
    Exported,
    Loading,
    each_definition,
    export_definitions,
)
from qflow_client.broker.policies.discipline import Discipline
from qflow_client.broker.policies.marks import MARKS, steered
from qflow_client.broker.policies.policy import Policy
from qflow_client.broker.policies.rates import RateLimit, Rates, RateScope
from qflow_client.broker.policies.recording import FlowRecorder
from qflow_client.broker.policies.rules import PolicyRules, rule_of
from qflow_client.broker.settings import BrokerOptions, BrokerSettings
from qflow_client.broker.store.journal import Journal
from qflow_client.flow import FlowSource

__all__ = ["Broker"]


def _names(source: FlowSource) -> tuple[str, str]:
    """What the client calls itself, and its connection's name."""
    assert isinstance(source, ChannelFlow)
    session = source.session
    return session.handshake.client_name or session.name, session.name


class Broker(CoreBroker):
    """An AMQP 0-9-1 broker in this process.

    ``with Broker() as broker:`` runs it on a thread and an event loop of its own, ``async with Broker() as broker:`` on
    the running loop. Its methods may be called from any thread, and from the loop it runs on. A broker runs once.

    With a store, what makes or removes a durable queue, exchange or binding returns when that is on disk; but on the
    loop that the broker runs on it returns before, and `wait_until_durable_async` waits.

    Args:
        **options: see `BrokerSettings`.

    Raises:
        TypeError: a setting of the wrong type, or one that does not exist.
        ValueError: a setting that is not allowed; the text names it, its value and what is allowed.
    """

    settings: BrokerSettings

    def __init__(self, **options: Unpack[BrokerOptions]) -> None:
        settings = BrokerSettings.of(options)
        has_store, limit = settings.store is not None, settings.memory_limit
        self._journal = Journal(time.time, has_store=has_store, limit=limit) if has_store or limit else None
        self._rules = PolicyRules(settings, settings.policies, has_store=has_store)
        discipline = Discipline if settings.has_discipline else None
        super().__init__(settings, rules=self._rules, journal=self._journal, discipline=discipline)
        host = self._host
        self._rates = host.meter = Rates(host.timers.wake_at)
        if settings.flow_log is not None:
            log = settings.flow_log
            host.observe(FlowRecorder(log.write, host.clock, time.time, period=log.period, names=_names))
        if settings.store is not None and self._journal is not None:
            self._journal.on_lost = host.lost
            self._disk = import_module("qflow_client.broker.store.keeper").Keeper(
                settings.store,
                settings.store_synchronous,
                settings.disk_free_limit,
                host,
                self._journal,
                self._server.touch,
                self._on_trouble,
            )
        # Only set if there is to be one.
        self._http = None
        if settings.http_port is not None:
            self._http = import_module("qflow_client.broker.http.server").HttpServer(self, self._count_answer)
            self._fronts.append(self._http)

    @property
    def http_url(self) -> str:
        """Where the HTTP API is.

        Raises:
            RuntimeError: there is none, or it has not been started.
        """
        if self._http is None:
            raise RuntimeError("the broker has no HTTP API; give it an http_port (0 for a free one)")
        scheme = "http" if self.settings.ssl_context is None else "https"
        return f"{scheme}://{url_host(self.settings.http_host)}:{self._http.port}"

    @property
    def memory(self) -> MemorySnapshot:
        """What messages take in memory, and what went to disk, at this moment."""
        return self._call(lambda: MemorySnapshot() if self._journal is None else self._journal.snapshot())

    def definitions(self) -> Definitions:
        """The queues, exchanges and bindings, but for exclusive queues and what every broker has."""
        return self._call(lambda: export_definitions(self._host, self._rules))

    def load_definitions(self, definitions: Definitions) -> None:
        """Declare everything, or nothing; what is there alike stays.

        Args:
            definitions: what to declare.

        Raises:
            DefinitionError: one of them is refused; the text says which and why.
        """
        self._call_in_steps(self.load_in_steps(definitions), lasts=True)

    # One at a time, for the broker's own loop. Each picture is of the moment at which the iterator gives it, so other
    # work may come between two of them. What is gone by then is left out, and what is new is not there.

    def load_in_steps(self, definitions: Definitions) -> Generator[None, None, None]:
        """`load_definitions` in steps, on the broker's loop: one iteration declares one thing.

        Raises:
            DefinitionError: one of them is refused, and what was declared before it is deleted again.
        """
        with closing(Loading(self._host, self._rules, definitions).steps()) as steps:
            for step in steps:
                self._server.touch()
                yield step

    def each_definition(self) -> Iterator[Exported]:
        """`definitions`, but for the policies; it may take several turns of the loop."""
        return each_definition(self._host)

    def each_queue(self) -> Iterator[QueueSnapshot]:
        """The queues, in the order in which they were made."""
        return (queue_snapshot(queue) for queue in tuple(self._host.queues.values()) if not queue.is_deleted)

    def each_connection(self) -> Iterator[ConnectionSnapshot]:
        """The connections, oldest first."""
        sessions = self._server.sessions
        return (connection_snapshot(session) for session in sessions if session.state is not State.ENDED)

    def _count_answer(self, change: int) -> None:
        """Take note that answers of the HTTP API take so many bytes more in memory."""
        if self._journal is not None:
            self._journal.answers += change
            # Publishers may have to wait for that, or may go on.
            self._server.touch()

    def has_queue(self, name: str) -> bool:
        """Whether there is a queue of that name."""
        return name in self._host.queues

    def has_exchange(self, name: str) -> bool:
        """Whether there is an exchange of that name."""
        return name in self._host.topology.exchanges

    @property
    def connection_count(self) -> int:
        """How many connections there are."""
        return len(self._server.sessions)

    def each_channel(self) -> Iterator[ChannelSnapshot]:
        """The open channels."""
        for session in self._server.sessions:
            for channel in tuple(session.channels.values()):
                if not channel.is_closing and session.state is not State.ENDED:
                    yield channel_snapshot(channel)

    def each_exchange(self) -> Iterator[ExchangeSnapshot]:
        """The exchanges, the default exchange first."""
        return (exchange_snapshot(exchange) for exchange in tuple(self._host.topology.exchanges.values()))

    def each_binding(self) -> Iterator[BindingSnapshot]:
        """The bindings, by exchange."""
        for exchange in tuple(self._host.topology.exchanges.values()):
            yield from binding_snapshots(exchange)

    def set_thresholds(self, queue: str, **marks: int | None) -> QueueSnapshot:
        """Put other marks in force while a queue is in use (D4); the flow state follows at once.

        What the queue was declared with stays what it has to be declared with again.

        Args:
            queue: its name.
            **marks: `flow_stop_count`, `flow_resume_count`, `flow_stop_size`, `flow_resume_size`, `capacity`,
                `flow_resume_capacity`; what is not given stays. ``None`` for a resume is 7/8 of its stop, for a resume
                capacity the capacity; 0 for a stop, or the capacity, turns it off.

        Returns:
            The queue as it is now.

        Raises:
            ChannelException: 404; there is no such queue. 406; marks that contradict each other, or the queue's
                maximum; the text names both values.
            TypeError: there is no such mark.
        """
        unknown = ", ".join(marks.keys() - set(MARKS))
        if unknown:
            raise TypeError(f"{unknown}: there is no such mark; there are {', '.join(MARKS)}")

        def change() -> QueueSnapshot:
            found = self._host.queue(queue)
            rule_of(found).steered = steered(found, marks)
            self._host.apply_rules(found)
            return queue_snapshot(found)

        return self._call(change, changes=True)

    # Policies.

    @property
    def policies(self) -> tuple[Policy, ...]:
        """The policies that there are, in the order in which they were set first."""
        return self._call(lambda: tuple(self._rules.policies))

    def set_policy(self, policy: Policy) -> None:
        """Add a policy, or replace the one of its name; queues that are there follow at once (D4).

        Nothing that is in a queue is lost, but for what a lower maximum of a ring drops.

        Args:
            policy: what to set.

        Raises:
            TypeError: it is no `Policy`.
        """
        if not isinstance(policy, Policy):
            raise TypeError(f"policy must be a Policy, not {type(policy).__name__}: {policy!r:.60}")
        self._call_in_steps(self.set_policy_in_steps(policy))

    def set_policy_in_steps(self, policy: Policy) -> Iterator[None]:
        """`set_policy` in steps, on the broker's loop: one iteration brings one queue up to date.

        Raises:
            ValueError: the policy needs a message store, and there is none.
        """
        for step in self._rules.set_policy_in_steps(policy, self._host):
            self._server.touch()
            yield step

    def delete_policy(self, name: str) -> None:
        """Remove a policy; queues go back to what else applies to them.

        Args:
            name: of the policy.

        Raises:
            LookupError: there is none of that name.
        """
        self._call_in_steps(self.delete_policy_in_steps(name))

    def delete_policy_in_steps(self, name: str) -> Iterator[None]:
        """`delete_policy` in steps, as `set_policy_in_steps`.

        Raises:
            LookupError: there is none of that name.
        """
        for step in self._rules.delete_policy_in_steps(name, self._host):
            self._server.touch()
            yield step

    @property
    def rate_limits(self) -> tuple[RateLimit, ...]:
        """The rate limits that there are, in the order in which they were set first."""
        return self._call(lambda: tuple(self._rates))

    def set_rate_limit(self, limit: RateLimit) -> None:
        """Add a rate limit, or replace the one for the same exchange, queue or user (F6).

        Args:
            limit: what to set.

        Raises:
            TypeError: it is no `RateLimit`.
        """
        if not isinstance(limit, RateLimit):
            raise TypeError(f"limit must be a RateLimit, not {type(limit).__name__}: {limit!r:.60}")

        def change() -> None:
            self._rates.set(limit, self._host.clock())
            self._controls.limit_rates(True)

        self._call(change, changes=True)

    def delete_rate_limit(self, apply_to: RateScope | str, name: str) -> None:
        """Remove a rate limit, and release the channels that it holds.

        Args:
            apply_to: ``exchange``, ``queue`` or ``user``.
            name: of that.

        Raises:
            LookupError: there is none.
            ValueError: `apply_to` is none of these.
        """
        scope = RateScope(apply_to)

        def change() -> None:
            self._rates.delete(scope, name)
            self._controls.limit_rates(bool(self._rates))

        self._call(change, changes=True)
