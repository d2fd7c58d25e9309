"""What arguments and policies put in force for each queue: the rules that plug into the virtual host.

A queue's rule keeps what its arguments say and what an operator has set for it (D4). What is in force is put together
anew each time that policies, bindings or marks change: the operator's marks go before policies, and those before or
behind arguments, as `Policies.definition_for` says.
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

_NO_STORE = "policy=flow_to_disk: this broker has no message store; give it one, or use another policy"


class PolicyRule:
    """What one queue was declared with, and what an operator has set for it.

    Args:
        rules: of all queues.
        queue: its name.
        arguments: as declared.

    Raises:
        ChannelException: 406; arguments are refused.
    """

    def __init__(self, rules: PolicyRules, queue: str, arguments: Mapping[str, object]) -> None:
        self._rules = rules
        self._queue = queue
        #: What its arguments say of when it is full.
        self.own = QueueArguments.read(queue, arguments)
        self.options = read_options(queue, arguments)
        #: What an operator has set, which goes before policies and arguments.
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
    """The rules of one virtual host. After a change, `VirtualHost.apply_rules` is to be called.

    Args:
        settings: the broker's.
        policies: to begin with.
        has_store: whether anything can be on disk.
    """

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
        """Add a policy, or replace the one of its name, for the queues that there are, too (D4).

        Raises:
            ValueError: it needs a message store, and there is none.
        """
        for _ in self.set_policy_in_steps(policy, host):
            pass

    def set_policy_in_steps(self, policy: Policy, host: VirtualHost) -> Iterator[None]:
        """`set_policy`, one queue in each step.

        Raises:
            ValueError: it needs a message store, and there is none.
        """
        if policy.definition.policy is QueuePolicy.FLOW_TO_DISK and not self.has_store:
            raise ValueError(_NO_STORE)
        self.policies.set(policy)
        yield from host.apply_rules_in_steps()

    def delete_policy(self, name: str, host: VirtualHost) -> None:
        """Remove a policy; queues go back to what else applies to them.

        Raises:
            LookupError: there is none of that name.
        """
        for _ in self.delete_policy_in_steps(name, host):
            pass

    def delete_policy_in_steps(self, name: str, host: VirtualHost) -> Iterator[None]:
        """`delete_policy`, one queue in each step.

        Raises:
            LookupError: there is none of that name.
        """
        self.policies.delete(name)
        yield from host.apply_rules_in_steps()

    def replace_policies_in_steps(self, policies: tuple[Policy, ...], host: VirtualHost) -> Iterator[None]:
        """Have these policies and no others, one queue in each step."""
        self.policies = Policies(self.settings.virtual_host, policies)
        yield from host.apply_rules_in_steps()


def rule_of(queue: Queue) -> PolicyRule:
    """The rule of a queue of a virtual host that has `PolicyRules`."""
    assert isinstance(queue.rule, PolicyRule)
    return queue.rule
