"""The complete broker: the core and the policies, with a message store and an HTTP API if the settings enable them.

The modules that use SQLite are imported only if the settings enable the store. So a broker without a store needs no
SQLite. The modules of the HTTP API, and their packages (the extra ``broker``), are needed only if the API is enabled.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import closing
from importlib import import_module
from typing import Unpack

from qflow_client.broker.core.broker import Broker as CoreBroker
from qflow_client.broker.core.channelflow import ChannelFlow
from qflow_client.broker.core.embedding import on_loop, url_host
from qflow_client.broker.core.snapshots import MemorySnapshot, QueueSnapshot, queue_snapshot
from qflow_client.broker.policies.definitions import (
    Definitions,
    Exported,
    Loading,
    each_definition,
    export_definitions,
)
from qflow_client.broker.policies.discipline import Discipline
from qflow_client.broker.policies.marks import steered
from qflow_client.broker.policies.policy import MARKS, Policy
from qflow_client.broker.policies.rates import RateLimit, Rates, RateScope
from qflow_client.broker.policies.recording import FlowRecorder
from qflow_client.broker.policies.rules import PolicyRules, rule_of
from qflow_client.broker.settings import BrokerOptions, BrokerSettings
from qflow_client.broker.store.journal import Journal
from qflow_client.flow import FlowSource

__all__ = ["Broker"]


def _names(source: FlowSource) -> tuple[str, str]:
    assert isinstance(source, ChannelFlow)
    session = source.session
    return session.handshake.client_name or session.name, session.name


class Broker(CoreBroker):
    """An AMQP 0-9-1 broker in this process.

    ``with Broker() as broker:`` runs the broker on a separate thread with its own event loop. ``async with Broker() as
    broker:`` runs the broker on the running event loop. A broker can be started only once. Any thread may call the
    methods of a broker. But use ``each_...`` and ``..._in_steps`` only on the broker's own loop.

    With a store, a method that creates or deletes a durable queue, exchange or binding returns when the change is on
    disk. On the broker's own event loop the method returns earlier: await `wait_until_durable_async` there.

    Args:
        **options: see `BrokerSettings`.

    Raises:
        TypeError: a setting has the wrong type, or does not exist.
        ValueError: a value is not allowed. The error contains the setting, the value and the allowed values.
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
                self._server.set_alarm,
            )
        self._http = None
        if settings.http_port is not None:
            self._http = import_module("qflow_client.broker.http.server").HttpServer(self, self._count_answer)
            self._fronts.append(self._http)

    @property
    def http_url(self) -> str:
        """The URL of the HTTP API.

        Raises:
            RuntimeError: the broker has no HTTP API, or has not been started.
        """
        if self._http is None:
            raise RuntimeError("the broker has no HTTP API; give it an http_port (0 for a free one)")
        scheme = "http" if self.settings.ssl_context is None else "https"
        return f"{scheme}://{url_host(self.settings.http_host)}:{self._http.port}"

    @property
    @on_loop()
    def memory(self) -> MemorySnapshot:
        """The memory that messages use now, and the counters of the message store."""
        return MemorySnapshot() if self._journal is None else self._journal.snapshot()

    @on_loop()
    def definitions(self) -> Definitions:
        """Return the queues, exchanges, bindings and policies, without exclusive queues and predeclared exchanges."""
        return export_definitions(self._host, self._rules)

    def load_definitions(self, definitions: Definitions) -> None:
        """Load all definitions, or none if one is refused. Of the existing objects, only policies change.

        Raises:
            DefinitionError: a definition is refused. The error contains the place of the definition and the reason.
        """
        self._call_in_steps(self.load_in_steps(definitions), lasts=True)

    def load_in_steps(self, definitions: Definitions) -> Generator[None, None, None]:
        """Do the work of `load_definitions` in small steps. Between two steps the broker's loop can do other work.

        Raises:
            DefinitionError: a definition is refused. Before the error is raised, further steps have undone all changes.
        """
        with closing(Loading(self._host, self._rules, definitions).steps()) as steps:
            yield from self._noted(steps)

    def _noted(self, steps: Iterator[None]) -> Iterator[None]:
        for step in steps:
            self._server.touch()
            yield step

    def each_definition(self) -> Iterator[Exported]:
        """Yield each exchange, queue and binding of `definitions`. The broker can change while the caller iterates."""
        return each_definition(self._host)

    def _count_answer(self, change: int) -> None:
        if self._journal is not None:
            self._journal.answers += change
            # The memory of large HTTP answers counts for the memory limit. `touch` schedules a check of this limit.
            self._server.touch()

    @on_loop(changes=True)
    def set_thresholds(self, queue: str, **marks: int | None) -> QueueSnapshot:
        """Change the thresholds of an existing queue (D4), and return a snapshot of the queue after the change.

        The flow state is updated immediately. Clients must still declare the queue with its original arguments.

        Args:
            queue: name of the queue.
            **marks: new values of `flow_stop_count`, `flow_resume_count`, `flow_stop_size`, `flow_resume_size`,
                `capacity` or `flow_resume_capacity`. A threshold that is not given keeps its value. ``None`` for a
                resume threshold means 7/8 of its stop threshold. ``None`` for a resume capacity means the capacity. A
                stop threshold or capacity of 0 also turns off its resume value.

        Raises:
            ChannelException: 404 if the queue does not exist. 406 if a value is not allowed, or if the thresholds
                contradict each other or the queue's maximum. The error contains the invalid values.
            TypeError: a keyword is not one of the names listed above.
        """
        unknown = sorted(marks.keys() - set(MARKS))
        if unknown:
            raise TypeError(f"{', '.join(unknown)} is not a mark; the marks are {', '.join(MARKS)}")
        found = self._host.queue(queue)
        rule_of(found).steered = steered(found, marks)
        self._host.apply_rules(found)
        return queue_snapshot(found)

    # Policies.

    @property
    @on_loop()
    def policies(self) -> tuple[Policy, ...]:
        """The policies, in the order in which they were first set."""
        return tuple(self._rules.policies)

    def set_policy(self, policy: Policy) -> None:
        """Add a policy, or replace the policy with the same name. Matching queues use the policy immediately (D4).

        If a policy lowers a queue's maximum, only `ring`, `ring_strict`, `conflate` and ``drop-head`` drop messages.

        Raises:
            TypeError: the argument is not a `Policy`.
            ValueError: the policy needs a message store, and the broker has none.
        """
        if not isinstance(policy, Policy):
            raise TypeError(f"policy must be a Policy, not {type(policy).__name__}: {policy!r:.60}")
        self._call_in_steps(self.set_policy_in_steps(policy))

    def set_policy_in_steps(self, policy: Policy) -> Iterator[None]:
        """Do the work of `set_policy` in small steps. Between two steps the broker's loop can do other work.

        Raises:
            ValueError: the policy needs a message store, and the broker has none.
        """
        return self._noted(self._rules.set_policy_in_steps(policy, self._host))

    def delete_policy(self, name: str) -> None:
        """Remove a policy. Queues that used the policy continue with their other policies and their arguments.

        Raises:
            LookupError: no policy has this name.
        """
        self._call_in_steps(self.delete_policy_in_steps(name))

    def delete_policy_in_steps(self, name: str) -> Iterator[None]:
        """Do the work of `delete_policy` in small steps. Between two steps the broker's loop can do other work.

        Raises:
            LookupError: no policy has this name.
        """
        return self._noted(self._rules.delete_policy_in_steps(name, self._host))

    @property
    @on_loop()
    def rate_limits(self) -> tuple[RateLimit, ...]:
        """The rate limits, in the order in which they were first set."""
        return tuple(self._rates)

    @on_loop(changes=True)
    def set_rate_limit(self, limit: RateLimit) -> None:
        """Add a rate limit, or replace the limit for the same exchange, queue or user (F6).

        Raises:
            TypeError: the argument is not a `RateLimit`.
        """
        if not isinstance(limit, RateLimit):
            raise TypeError(f"limit must be a RateLimit, not {type(limit).__name__}: {limit!r:.60}")
        self._rates.set(limit, self._host.clock())
        self._controls.limit_rates(True)

    @on_loop(changes=True)
    def delete_rate_limit(self, apply_to: RateScope | str, name: str) -> None:
        """Remove a rate limit, and unblock the channels that this limit blocks.

        Args:
            apply_to: kind of the limited object: ``exchange``, ``queue`` or ``user``.
            name: name of the exchange, queue or user.

        Raises:
            LookupError: the object has no rate limit.
            ValueError: `apply_to` is not ``exchange``, ``queue`` or ``user``.
        """
        self._rates.delete(RateScope(apply_to), name)
        self._controls.limit_rates(bool(self._rates))
