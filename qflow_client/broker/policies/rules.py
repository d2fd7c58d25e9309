"""Computes the limits of each queue from the queue's arguments, the policies, and the marks of an operator.

Marks are thresholds and capacities that an operator sets for an existing queue (D4). Marks have priority over policies
and arguments. The limits of a queue are computed again when policies, bindings or marks change. `policy.py` describes
which policies have priority over the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from qflow_client.broker.core.errors import ChannelException, ReplyCode
from qflow_client.broker.core.limits import Inheritance, QueueLimits
from qflow_client.broker.core.queue import Queue
from qflow_client.broker.core.settings import Settings
from qflow_client.broker.core.virtualhost import VirtualHost
from qflow_client.broker.policies.arguments import QueueArguments, read_options, resolve_limits
from qflow_client.broker.policies.policy import Policies, Policy, PolicyDefinition, QueuePolicy

__all__ = ["PolicyRule", "PolicyRules", "rule_of"]

_NO_STORE = "policy=flow_to_disk: this broker has no message store; set store, or use another policy"


class PolicyRule:
    """Computes the limits of one queue from its arguments, the policies and the operator's marks.

    Raises:
        ChannelException: 406 if an argument is not allowed.
    """

    def __init__(self, rules: PolicyRules, queue: str, arguments: Mapping[str, object]) -> None:
        self._rules = rules
        self._queue = queue
        self.own = QueueArguments.read(queue, arguments)
        self.options = read_options(queue, arguments)
        #: The operator's marks.
        self.steered = PolicyDefinition()

    def limits(self, inheritance: Callable[[], Inheritance]) -> QueueLimits:
        rules, own = self._rules, self.own
        definition, policies = rules.policies.definition_for(
            self._queue, own.definition, inheritance, is_set=own.is_set
        )
        definition = self.steered.over(definition)
        if definition.policy is QueuePolicy.FLOW_TO_DISK and not rules.has_store:
            raise ChannelException(ReplyCode.PRECONDITION_FAILED, f"queue '{self._queue}': {_NO_STORE}")
        return resolve_limits(self._queue, definition, rules.settings, overflow=own.overflow, policies=policies)


class PolicyRules:
    """Creates the rules of a virtual host's queues, and applies changes of policies to these queues."""

    def __init__(self, settings: Settings, policies: tuple[Policy, ...] = (), *, has_store: bool = False) -> None:
        self.settings = settings
        self.has_store = has_store
        self.policies = Policies(settings.virtual_host, policies)

    @property
    def are_inherited(self) -> bool:
        return self.policies.are_inherited

    def rule_for(self, queue: str, arguments: Mapping[str, object]) -> PolicyRule:
        return PolicyRule(self, queue, arguments)

    def set_policy(self, policy: Policy, host: VirtualHost) -> None:
        """Add or replace a policy (D4). Raise `ValueError` if it needs a message store, and the broker has none."""
        for _ in self.set_policy_in_steps(policy, host):
            pass

    def set_policy_in_steps(self, policy: Policy, host: VirtualHost) -> Iterator[None]:
        """Do the work of `set_policy`, and yield after each queue."""
        if policy.definition.policy is QueuePolicy.FLOW_TO_DISK and not self.has_store:
            raise ValueError(_NO_STORE)
        self.policies.set(policy)
        yield from host.apply_rules_in_steps()

    def delete_policy(self, name: str, host: VirtualHost) -> None:
        """Remove a policy. Raise `LookupError` if no policy has this name."""
        for _ in self.delete_policy_in_steps(name, host):
            pass

    def delete_policy_in_steps(self, name: str, host: VirtualHost) -> Iterator[None]:
        """Do the work of `delete_policy`, and yield after each queue."""
        self.policies.delete(name)
        yield from host.apply_rules_in_steps()

    def replace_policies_in_steps(self, policies: tuple[Policy, ...], host: VirtualHost) -> Iterator[None]:
        """Replace all policies, and compute the limits of all queues again. Yield after each queue."""
        self.policies = Policies(self.settings.virtual_host, policies)
        yield from host.apply_rules_in_steps()


def rule_of(queue: Queue) -> PolicyRule:
    """Return the rule of a queue. The virtual host of the queue must have `PolicyRules`."""
    assert isinstance(queue.rule, PolicyRule)
    return queue.rule
