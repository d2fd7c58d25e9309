"""A simple model of the rules for queues and policies, and a `Rig` that compares the broker with it after each step.

The model keeps lists, and computes everything anew each time. The model shares no code with the broker.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pamqp import commands

from qflow_client.broker.policies.policy import Policy, PolicyDefinition

QUEUES = ("a", "b", "c")
PUBLISHERS = 3
WAIT = 7.0
#: Operations that `Rig.step` can execute. The function `draw` chooses an operation and its arguments.
OPERATIONS = ("publish", "publish", "publish", "publish", "get", "settle", "purge", "set_policy", "sleep", "reopen")


@dataclass(eq=False)
class Message:
    number: int
    who: int
    size: int
    ttl: float | None
    key: str | None
    routing_key: str
    # Delivery tag of the message; None while the message is ready.
    delivery: int | None = None
    # Time at which the message entered its queue, in seconds.
    since: float = 0.0


@dataclass
class Family:
    """A stop threshold with its resume threshold, of the kind ``stop`` or ``capacity``."""

    kind: str
    stops: Any = None
    resumes: Any = None
    on: bool = False
    blocked: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)

    def holds_publisher(self, count: int, size: int) -> bool:
        return self.on and (self.kind == "stop" or self.stops(count, size))


class ModelQueue:
    """A queue that follows the text of the specification."""

    def __init__(self, model: Model, name: str) -> None:
        self.model = model
        self.name = name
        self.messages: list[Message] = []
        self.families: list[Family] = []
        self.times_on = 0
        self.drops = 0
        self.on_since: float | None = None
        self.overdue = False
        self.definition: dict[str, Any] = {}

    # The settings that apply.

    def get(self, name: str) -> Any:
        return self.definition.get(name)

    @property
    def base_policy(self) -> str:
        policy: str | None = self.get("policy")
        if policy is not None:
            return policy
        return "reject" if self.get("max_count") or self.get("max_size") else "flow"

    @property
    def policy(self) -> str:
        return self.get("then") or "reject" if self.overdue else self.base_policy

    @property
    def maxima(self) -> tuple[int, int]:
        count, size = self.get("max_count") or 0, self.get("max_size") or 0
        if self.base_policy == "flow_to_disk":
            # For this policy, the maxima limit only the messages in memory, and do not affect publishers.
            count = size = 0
        if self.overdue:
            stops = self.stops
            count = count or stops[0]
            size = size or stops[1] or self.get("capacity") or 0
        return count, size

    @property
    def stops(self) -> tuple[int, int]:
        stops = self.get("flow_stop_count"), self.get("flow_stop_size")
        if stops != (None, None):
            return stops[0] or 0, stops[1] or 0
        if self.base_policy not in ("flow", "reject"):
            return 0, 0
        count, size = (self.get(name) or 0 for name in ("max_count", "max_size"))
        return (max(1, count * 8 // 10) if count else 0), (max(1, size * 8 // 10) if size else 0)

    @property
    def resumes(self) -> tuple[int, int]:
        if (self.get("flow_stop_count"), self.get("flow_stop_size")) == (None, None):
            count, size = (self.get(name) or 0 for name in ("max_count", "max_size"))
            return max(1, count * 7 // 10), max(1, size * 7 // 10)
        return tuple(  # type: ignore[return-value]
            self.get(f"flow_resume_{unit}") or max(1, stop * 7 // 8)
            for unit, stop in zip(("count", "size"), self.stops, strict=True)
        )

    def change(self, definition: dict[str, Any]) -> None:
        if definition == self.definition:
            return
        self.definition = definition
        if not definition.get("max_flow_wait"):
            self.overdue = False
        if self.base_policy == "conflate":
            for message in list(self.messages):
                if message in self.messages:
                    self.conflate(message)
        if self.policy in ("ring", "ring_strict", "conflate"):
            self.make_room(0, 0)
        (stop_count, stop_size), (resume_count, resume_size) = self.stops, self.resumes
        wanted = []
        if stop_count or stop_size:
            wanted.append(
                Family(
                    "stop",
                    lambda n, b: 0 < stop_count < n or 0 < stop_size < b,
                    lambda n, b: (not stop_count or n < resume_count) and (not stop_size or b < resume_size),
                )
            )
        capacity = definition.get("capacity") or 0
        if capacity:
            resume = definition.get("flow_resume_capacity", capacity)
            wanted.append(Family("capacity", lambda n, b: b > capacity, lambda n, b: b <= resume))
        before = {family.kind: family for family in self.families}
        for family in wanted:
            old = before.get(family.kind)
            if old is not None:
                family.on, family.blocked, family.held = old.on, old.blocked, old.held
            self.look(family)
            enforcement = definition.get("enforcement", "both")
            if enforcement == "completion":
                family.blocked.clear()
            if enforcement == "channel_flow":
                family.held.clear()
        self.families = wanted
        self.look_whether_on()

    # Depth.

    @property
    def depth(self) -> tuple[int, int]:
        return len(self.messages), sum(message.size for message in self.messages)

    def look(self, family: Family) -> None:
        if not family.on and family.stops(*self.depth):
            family.on = True
            self.times_on += 1
        elif family.on and family.resumes(*self.depth):
            family.on = False
        if not family.on:
            family.blocked.clear()
            family.held.clear()

    def look_whether_on(self, *, makes_room: bool = False) -> None:
        is_on = any(family.on for family in self.families)
        if is_on and self.on_since is None:
            self.on_since = self.model.now
        if not is_on and not (makes_room and self.overdue):
            self.on_since = None
            self.overdue = False

    def left(self, message: Message, *, makes_room: bool = False) -> None:
        self.messages.remove(message)
        for family in self.families:
            family.held.discard(message.number)
            self.look(family)
        self.look_whether_on(makes_room=makes_room)

    def drop(self, message: Message, *, makes_room: bool = False) -> None:
        self.drops += 1
        self.left(message, makes_room=makes_room)

    # Arriving messages.

    def refusal(self, size: int) -> str | None:
        count, limit = self.maxima
        depth, total = self.depth
        beyond = bool(count and depth + 1 > count) or bool(limit and total + size > limit)
        match self.policy:
            case "reject":
                return "refused" if beyond else None
            case "wait":
                if not beyond:
                    return None
                return "refused" if limit and size > limit else "waits"
            case "ring" | "conflate":
                return "refused" if limit and size > limit else None
            case "ring_strict":
                if limit and size > limit:
                    return "refused"
                messages = list(self.messages)
                while messages and (
                    (count and len(messages) + 1 > count) or (limit and sum(m.size for m in messages) + size > limit)
                ):
                    if messages.pop(0).delivery is not None:
                        return "refused"
        return None

    def makes_wait(self, size: int) -> bool:
        limit = self.maxima[1]
        return self.policy == "wait" and any(self.maxima) and not (limit and size > limit)

    def make_room(self, more: int, size: int) -> None:
        count, limit = self.maxima
        while self.messages and ((count and self.depth[0] + more > count) or (limit and self.depth[1] + size > limit)):
            if self.policy == "ring_strict" and self.messages[0].delivery is not None:
                break
            self.drop(self.messages[0], makes_room=True)

    def conflate(self, message: Message) -> None:
        """Drop the last earlier message with the same key, unless a consumer has that message."""
        at = self.messages.index(message) if message in self.messages else len(self.messages)
        same = [
            each for each in self.messages[:at] if self.key(each) is not None and self.key(each) == self.key(message)
        ]
        if same and same[-1].delivery is None:
            self.drop(same[-1])

    def key(self, message: Message) -> str | None:
        return message.key if self.get("conflate_key") else message.routing_key

    def enqueue(self, message: Message) -> None:
        if self.base_policy == "conflate":
            self.conflate(message)
        if self.policy in ("ring", "ring_strict", "conflate"):
            self.make_room(1, message.size)
        self.messages.append(message)
        enforcement = self.get("enforcement") or "both"
        for family in self.families:
            self.look(family)
            self.look_whether_on(makes_room=True)
            if self.overdue:
                continue
            if family.on and enforcement != "channel_flow":
                family.held.add(message.number)
            if enforcement != "completion" and family.holds_publisher(*self.depth):
                family.blocked.add(message.who)

    def tick(self) -> None:
        for message in list(self.messages):
            if message.delivery is None and message.ttl is not None and message.since + message.ttl <= self.model.now:
                self.drop(message)
        wait = self.get("max_flow_wait")
        if wait and self.on_since is not None and not self.overdue and self.model.now >= self.on_since + wait:
            self.overdue = True
            for family in self.families:
                family.blocked.clear()
                family.held.clear()


@dataclass(eq=False)
class Waiter:
    message: Message
    queues: list[ModelQueue]
    deadline: float


class Model:
    """The queues, and the publishes that wait for room in a queue."""

    def __init__(self) -> None:
        self.now = 0.0
        self.queues = {name: ModelQueue(self, name) for name in QUEUES}
        self.waiters: list[Waiter] = []
        # Numbers of the accepted messages, and of the nacked messages. Publishes of closed channels are in neither set.
        self.taken: set[int] = set()
        self.nacked: set[int] = set()

    def publish(self, message: Message, names: tuple[str, ...]) -> None:
        queues = [self.queues[name] for name in names]
        refusals = {queue.refusal(message.size) for queue in queues}
        if "refused" in refusals:
            self.nacked.add(message.number)
        elif "waits" in refusals or any(queue in waiter.queues for waiter in self.waiters for queue in queues):
            self.waiters.append(Waiter(message, queues, self.now + WAIT))
        else:
            self.take(message, queues)

    def take(self, message: Message, queues: list[ModelQueue]) -> None:
        self.taken.add(message.number)
        for queue in queues:
            # Each queue has its own copy of the message.
            queue.enqueue(Message(**vars(message) | {"since": self.now}))

    def settle_waiters(self) -> None:
        """Accept waiting publishes that have room, and nack those whose time is over, until nothing changes."""
        again = True
        while again:
            again = False
            for at, waiter in enumerate(self.waiters):
                before = {id(queue) for each in self.waiters[:at] for queue in each.queues}
                refusals = {queue.refusal(waiter.message.size) for queue in waiter.queues}
                is_first = not any(id(queue) in before for queue in waiter.queues)
                if is_first and refusals == {None}:
                    self.waiters.remove(waiter)
                    self.take(waiter.message, waiter.queues)
                elif self.now >= waiter.deadline or (
                    is_first
                    and "refused" in refusals
                    and not any(queue.makes_wait(waiter.message.size) for queue in waiter.queues)
                ):
                    self.waiters.remove(waiter)
                    self.nacked.add(waiter.message.number)
                else:
                    continue
                again = True
                break

    def tick(self) -> None:
        for queue in self.queues.values():
            queue.tick()
        self.settle_waiters()

    @property
    def held(self) -> set[int]:
        return {number for queue in self.queues.values() for family in queue.families for number in family.held}


def body_of(number: int, size: int) -> bytes:
    return bytes((number % 256,)) * size


class Rig:
    """Executes the same operations on the broker and on the model.

    Args:
        world: a virtual host and its clients, without sockets.
        draw: function that chooses one of several values.
        disk: disk to which the journal of `world` writes (A2); ``None`` if `world` has no journal.
    """

    def __init__(self, world: Any, draw: Any, disk: Any = None) -> None:
        self.world = world
        self.disk = disk
        self.draw = draw
        # Policies that need a disk, several times so that they are often drawn.
        self.more = ("flow_to_disk",) * 4 if disk is not None else ()
        self.model = Model()
        self.consumer = world.client().channel()
        for name in QUEUES:
            self.consumer.declare(name)
            bind = commands.Queue.Bind(queue=name, exchange="amq.fanout")
            self.consumer.call(1, bind, commands.Queue.BindOk)
        self.clients = [world.client().channel(confirms=True) for _ in range(PUBLISHERS)]
        # For each publisher: numbers of its unconfirmed messages by tag, its last tag, and whether it is flowed.
        self.open: list[dict[int, int]] = [{} for _ in self.clients]
        self.tags = [0] * PUBLISHERS
        self.flowed = [False] * PUBLISHERS
        self.acked: set[int] = set()
        self.nacked: set[int] = set()
        # Messages whose confirms cannot arrive, because their channel was closed.
        self.lost: set[int] = set()
        self.numbers = 0
        self.deliveries: dict[int, tuple[ModelQueue, Message]] = {}
        self.delivery_tag = 0

    def step(self) -> str:
        """Execute one operation on the broker and on the model, and compare them.

        Returns:
            The name of the operation.
        """
        # Advance by a random time, so that no two events are due at the same time.
        self._advance(0.001 + self.draw(range(1, 1000)) / 1e6)
        operation: str = self.draw(OPERATIONS)
        getattr(self, f"_{operation}")()
        self._tick()
        self.compare()
        if self.disk is not None and self.draw((True, False)):
            self.disk.write()
            if self.disk.journal.limit:
                self.world.host.relieve()
                self.disk.write()
            self.disk.check(self.world.host.queues.values())
        return operation

    def _advance(self, seconds: float) -> None:
        host, until = self.world.host, self.world.now + seconds
        while host.timers.next_tick <= until:
            self.world.now = max(self.world.now, host.timers.next_tick)
            self._tick()
        self.world.now = until
        self._tick()

    def _tick(self) -> None:
        self.model.now = self.world.now
        self.world.host.timers.tick(self.world.now)
        self.model.tick()

    def _publish(self) -> None:
        who, to = self.draw(range(PUBLISHERS)), self.draw((*QUEUES, None))
        size, ttl, key = self.draw(range(6)), self.draw((None, None, None, 900, 4000)), self.draw((None, "x", "y"))
        self.numbers += 1
        self.tags[who] += 1
        self.open[who][self.tags[who]] = self.numbers
        properties = commands.Basic.Properties(
            headers={"k": key} if key is not None else None, expiration=None if ttl is None else str(ttl)
        )
        exchange = "amq.fanout" if to is None else ""
        self.clients[who].publish(body_of(self.numbers, size), to or "", exchange=exchange, properties=properties)
        message = Message(self.numbers, who, size, None if ttl is None else ttl / 1000, key, to or "")
        self.model.publish(message, QUEUES if to is None else (to,))

    def _get(self) -> None:
        queue, no_ack = self.model.queues[self.draw(QUEUES)], self.draw((True, False))
        self.consumer.send(1, commands.Basic.Get(queue=queue.name, no_ack=no_ack))
        if self.disk is not None:
            # Bodies that are not written yet can still be delivered.
            self.disk.read()
        frames = [each for _, each in self.consumer.received()]
        message = next((each for each in queue.messages if each.delivery is None), None)
        assert (message is None) == (frames[0].name == "Basic.GetEmpty"), (frames[0].name, message)
        if message is None:
            return
        self.delivery_tag += 1
        assert frames[0].delivery_tag == self.delivery_tag
        assert frames[1].body_size == message.size
        assert b"".join(each.value for each in frames[2:]) == body_of(message.number, message.size)
        if no_ack:
            queue.left(message)
        else:
            message.delivery = self.delivery_tag
            self.deliveries[self.delivery_tag] = (queue, message)

    def _settle(self) -> None:
        if not self.deliveries:
            return
        tag = self.draw(sorted(self.deliveries))
        queue, message = self.deliveries.pop(tag)
        how = self.draw(("ack", "reject", "requeue"))
        if how == "ack":
            self.consumer.send(1, commands.Basic.Ack(tag))
        else:
            self.consumer.send(1, commands.Basic.Reject(tag, requeue=how == "requeue"))
        if message not in queue.messages:
            return
        message.delivery = None
        if how == "ack":
            queue.left(message)
        elif how == "reject":
            queue.drop(message)
        elif queue.base_policy == "conflate" and queue.key(message) is not None:
            later = queue.messages[queue.messages.index(message) + 1 :]
            if any(queue.key(each) == queue.key(message) for each in later):
                queue.drop(message)

    def _purge(self) -> None:
        queue = self.model.queues[self.draw(QUEUES)]
        self.world.queue(queue.name).purge()
        for message in [each for each in queue.messages if each.delivery is None]:
            queue.left(message)

    def _set_policy(self) -> None:
        name = self.draw(QUEUES)
        definition: dict[str, Any] = {}
        if self.draw((True, True, True, False)):
            definition["policy"] = self.draw(("flow", "reject", "ring", "ring_strict", "wait", "conflate", *self.more))
        for maximum in ("max_count", "max_size"):
            if self.draw((True, False)):
                definition[maximum] = self.draw((1, 3, 6, 9))
        for unit in ("count", "size"):
            if self.draw((True, False)):
                most = 9 if definition.get("policy") == "flow_to_disk" else definition.get(f"max_{unit}", 9)
                stop = min(self.draw((1, 2, 4, 5)), most)
                definition[f"flow_stop_{unit}"] = stop
                if self.draw((True, False)):
                    definition[f"flow_resume_{unit}"] = self.draw(range(1, stop + 1))
        if self.draw((True, False)):
            definition["capacity"] = self.draw((3, 8))
            if self.draw((True, False)):
                definition["flow_resume_capacity"] = self.draw((0, 2))
        if self.draw((True, False, False)):
            definition["enforcement"] = self.draw(("both", "completion", "channel_flow"))
        if definition.get("policy") == "conflate" and self.draw((True, False)):
            definition["conflate_key"] = "k"
        if self.draw((True, False)):
            definition["max_flow_wait"] = self.draw((0.5, 3))
            if self.draw((True, False)):
                definition["then"] = self.draw(("reject", "ring", "wait"))
        if definition:
            self.world.set_policy(Policy(name, PolicyDefinition.from_mapping(definition), f"^{name}$"))
        elif any(policy.name == name for policy in self.world.rules.policies):
            self.world.delete_policy(name)
        self.model.queues[name].change(definition)

    def _sleep(self) -> None:
        self._advance(self.draw((0.2, 1.0, 5.0)))

    def _reopen(self) -> None:
        if self.draw(range(4)):
            return
        who = self.draw(range(PUBLISHERS))
        self.read(who)
        client = self.clients[who]
        client.send(1, commands.Channel.Close(200, "", 0, 0))
        self.read(who)
        client.channel(confirms=True)
        self.lost |= set(self.open[who].values())
        self.open[who], self.tags[who], self.flowed[who] = {}, 0, False
        for queue in self.model.queues.values():
            for family in queue.families:
                family.blocked.discard(who)
        for waiter in [each for each in self.model.waiters if each.message.who == who]:
            self.model.waiters.remove(waiter)
            waiter.queues[0].drops += 1

    def read(self, who: int) -> None:
        """Read the frames that the broker has sent to a publisher."""
        for _, each in self.clients[who].received():
            if each.name == "Channel.Flow":
                assert each.active is self.flowed[who], "told twice"
                self.flowed[who] = not each.active
            elif each.name in ("Basic.Ack", "Basic.Nack"):
                tags = [tag for tag in self.open[who] if tag <= each.delivery_tag] if each.multiple else []
                for tag in tags or [each.delivery_tag]:
                    number = self.open[who].pop(tag)
                    (self.acked if each.name == "Basic.Ack" else self.nacked).add(number)
            else:
                assert each.name == "Channel.CloseOk", each.name

    def compare(self) -> None:
        """Check that the broker and the model have the same state."""
        model = self.model
        for name, queue in model.queues.items():
            real = self.world.queue(name)
            contents = real.contents
            assert (real.depth, real.size) == queue.depth, name
            assert [entry.message.size for entry in contents.oldest_first()] == [
                each.size for each in queue.messages
            ], name
            ready = [each for each in queue.messages if each.delivery is None]
            assert (contents.ready_count, contents.ready_size) == (
                len(ready),
                sum(each.size for each in ready),
            ), name
            assert contents.dropped == queue.drops, (name, contents.drops, queue.drops)
            assert [family.limiter.on for family in real.flows.families] == [each.on for each in queue.families], name
            assert real.flows.times_on == queue.times_on, name
            assert real.flows.is_overdue is queue.overdue, name
            assert real.waiting == sum(queue in waiter.queues for waiter in model.waiters), name
        blocked = {who for queue in model.queues.values() for family in queue.families for who in family.blocked}
        for who in range(PUBLISHERS):
            self.read(who)
            assert self.flowed[who] is (who in blocked), who
        assert self.nacked == model.nacked - self.lost
        waiting = {waiter.message.number for waiter in model.waiters}
        assert self.acked == (model.taken - model.held - waiting) - self.lost | (self.acked & self.lost)
