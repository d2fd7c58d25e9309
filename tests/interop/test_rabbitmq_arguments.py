"""Arguments and features of RabbitMQ. The same program gets the same results from RabbitMQ and from the broker here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker, NackError

from qflow_client.broker import Broker
from qflow_client.testing.rabbitmq import RabbitMQNode

pytestmark = pytest.mark.rabbitmq

# Maximum seconds of any wait. Even a busy machine needs far less.
PATIENCE = 60.0


class Desk:
    """A channel, and unique names for its queues and exchanges."""

    def __init__(self, url: str) -> None:
        self.parameters = pika.URLParameters(url)
        self.connection = pika.BlockingConnection(self.parameters)
        # In pika's types, each result may be None, because the queue may be empty.
        self.channel: Any = self.connection.channel()
        # With confirms, a message is in its queue when `publish` returns.
        self.channel.confirm_delivery()
        self._suffix = uuid4().hex
        self._names: list[str] = []

    def name(self, name: str) -> str:
        return f"{name}-{self._suffix}"

    def plain(self, name: str) -> str:
        """Return a name without the unique suffix."""
        return name.removesuffix(f"-{self._suffix}")

    def declare(self, name: str, **arguments: Any) -> str:
        full = self.name(name)
        self._names.append(full)
        self.channel.queue_declare(full, arguments={key.replace("_", "-"): value for key, value in arguments.items()})
        return full

    def publish(self, name: str, *bodies: str, **properties: Any) -> None:
        for body in bodies:
            self.channel.basic_publish("", self.name(name), body.encode(), pika.BasicProperties(**properties))

    def outcomes(self, name: str, *bodies: str) -> list[str]:
        """Publish messages, and return "ack" or "nack" for each."""
        outcomes = []
        for body in bodies:
            try:
                self.publish(name, body)
            except NackError:
                outcomes.append("nack")
            else:
                outcomes.append("ack")
        return outcomes

    def depth(self, name: str) -> int:
        count: int = self.channel.queue_declare(self.name(name), passive=True).method.message_count
        return count

    def wait_depth(self, name: str, depth: int, timeout: float = PATIENCE) -> None:
        end = time.monotonic() + timeout
        while self.depth(name) != depth:
            assert time.monotonic() < end, f"{name}: {self.depth(name)} messages, not {depth}"
            time.sleep(0.01)

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Consume until a condition is true."""
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, "it did not become true"
            self.connection.process_data_events(0.05)

    def drain(self, name: str) -> list[str]:
        bodies = []
        while (got := self.channel.basic_get(self.name(name), auto_ack=True))[2] is not None:
            bodies.append(got[2].decode())
        return bodies

    def deaths(self, name: str) -> list[Any]:
        """Get all messages. Return the body, first death and all deaths of each, without times and suffixes."""
        seen: list[Any] = []
        while True:
            method, properties, body = self.channel.basic_get(self.name(name), auto_ack=True)
            if method is None:
                return seen
            headers = properties.headers
            deaths = [
                {key: self._plainly(value) for key, value in death.items() if key != "time"}
                for death in headers["x-death"]
            ]
            first = [self._plainly(headers[f"x-first-death-{what}"]) for what in ("reason", "queue", "exchange")]
            routed = self.plain(method.routing_key), self.plain(method.exchange)
            seen.append((body.decode(), routed, properties.expiration, first, deaths))

    def _plainly(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._plainly(item) for item in value]
        return self.plain(value) if isinstance(value, str) else value

    def error(self, call: Callable[[], object]) -> int:
        """Check that a call closes the channel, open a new channel, and return the reply code."""
        with pytest.raises(ChannelClosedByBroker) as caught:
            call()
        self.channel = self.connection.channel()
        code: int = caught.value.reply_code
        return code

    def close(self) -> None:
        channel = self.connection.channel()
        for name in self._names:
            channel.queue_delete(name)
        self.connection.close()


@pytest.fixture(params=["RabbitMQ", "qflow"])
def desk(request: pytest.FixtureRequest) -> Iterator[Desk]:
    if request.param == "RabbitMQ":
        node: RabbitMQNode = request.getfixturevalue("rabbitmq")
        made = Desk(node.url)
        yield made
        made.close()
        return
    with Broker() as broker:
        made = Desk(broker.url)
        yield made
        made.close()


@pytest.mark.parametrize(("count", "left"), [(2, ["1", "2"]), (3, ["1", "2", "3"]), (4, ["2", "3", "4"])])
def test_with_x_max_length_messages_beyond_the_maximum_are_dropped_at_the_head(
    desk: Desk, count: int, left: list[str]
) -> None:
    desk.declare("q", x_max_length=3)
    assert desk.outcomes("q", *(str(number + 1) for number in range(count))) == ["ack"] * count
    assert desk.drain("q") == left


@pytest.mark.parametrize(("last", "left"), [("55", ["1", "22", "55"]), ("555", ["22", "555"]), ("55555", ["55555"])])
def test_with_x_max_length_bytes_as_many_messages_as_necessary_are_dropped_at_the_head(
    desk: Desk, last: str, left: list[str]
) -> None:
    desk.declare("q", x_max_length_bytes=5, x_overflow="drop-head")
    assert desk.outcomes("q", "1", "22", last) == ["ack"] * 3
    assert desk.drain("q") == left


def test_a_message_larger_than_x_max_length_bytes_is_dropped_with_all_messages_before_it(desk: Desk) -> None:
    desk.declare("q", x_max_length_bytes=5)
    assert desk.outcomes("q", "1", "22", "666666") == ["ack"] * 3
    assert desk.drain("q") == []


def test_a_queue_with_x_max_length_0_keeps_no_message(desk: Desk) -> None:
    desk.declare("q", x_max_length=0)
    assert desk.outcomes("q", "1") == ["ack"]
    assert desk.depth("q") == 0


def test_only_ready_messages_count_towards_x_max_length(desk: Desk) -> None:
    desk.declare("q", x_max_length=1)
    desk.publish("q", "1")
    method, _, body = desk.channel.basic_get(desk.name("q"))
    assert body == b"1"
    desk.publish("q", "2")
    assert desk.depth("q") == 1
    desk.channel.basic_ack(method.delivery_tag)
    assert desk.drain("q") == ["2"]


@pytest.mark.parametrize("overflow", ["reject-publish", "reject-publish-dlx"])
def test_with_reject_publish_messages_that_do_not_fit_are_nacked(desk: Desk, overflow: str) -> None:
    desk.declare("dead")
    desk.declare(
        "q",
        x_max_length=2,
        x_max_length_bytes=6,
        x_overflow=overflow,
        x_dead_letter_exchange="",
        x_dead_letter_routing_key=desk.name("dead"),
    )
    assert desk.outcomes("q", "1", "666666", "55555", "3") == ["ack", "nack", "ack", "nack"]
    assert desk.drain("q") == ["1", "55555"]
    desk.wait_depth("dead", 2 if overflow == "reject-publish-dlx" else 0)
    assert [(body, deaths[0]["reason"]) for body, _, _, _, deaths in desk.deaths("dead")] == (
        [("666666", "maxlen"), ("3", "maxlen")] if overflow == "reject-publish-dlx" else []
    )


def test_with_reject_publish_and_without_confirms_messages_that_do_not_fit_are_dropped(desk: Desk) -> None:
    desk.declare("q", x_max_length=1, x_overflow="reject-publish")
    desk.publish("q", "1")
    desk.channel = desk.connection.channel()
    desk.publish("q", "2", "3")
    assert desk.drain("q") == ["1"]


def test_messages_expire_after_the_shorter_time_to_live_of_queue_and_message(desk: Desk) -> None:
    desk.declare("q", x_message_ttl=60_000)
    desk.publish("q", "soon", expiration="50")
    desk.publish("q", "later")
    desk.wait_depth("q", 1)
    assert desk.drain("q") == ["later"]
    desk.declare("short", x_message_ttl=50)
    desk.publish("short", "soon", expiration="60000")
    desk.publish("short", "soon")
    desk.wait_depth("short", 0)


def test_a_message_with_expiration_0_is_dropped_unless_a_consumer_is_ready(desk: Desk) -> None:
    desk.declare("q", x_message_ttl=0)
    desk.publish("q", "1")
    desk.publish("q", "2", expiration="0")
    assert desk.depth("q") == 0
    seen: list[bytes] = []

    def take(channel: BlockingChannel, method: Any, _: object, body: bytes) -> None:
        seen.append(body)
        channel.basic_ack(method.delivery_tag)

    desk.channel.basic_consume(desk.name("q"), take)
    desk.publish("q", "3")
    desk.wait_for(lambda: seen)
    assert seen == [b"3"]


def test_an_unacked_message_does_not_expire_before_it_is_requeued(desk: Desk) -> None:
    desk.declare("q", x_message_ttl=50)
    tags: list[int] = []
    desk.channel.basic_qos(prefetch_count=1)
    # Start the consumer before publishing, because on a slow machine the first message could expire before a `get`.
    desk.channel.basic_consume(desk.name("q"), lambda _channel, method, *_: tags.append(method.delivery_tag))
    desk.publish("q", "1", "2")
    desk.wait_for(lambda: tags)
    desk.wait_depth("q", 0)
    (tag,) = desk.channel.consumer_tags
    desk.channel.basic_cancel(tag)
    desk.channel.basic_nack(tags[0], requeue=True)
    assert desk.drain("q") == []
    assert len(tags) == 1


@pytest.mark.parametrize("expiration", ["x", "-1", "", "1.5", " 1"])
def test_an_expiration_that_is_not_a_number_closes_the_channel(desk: Desk, expiration: str) -> None:
    desk.declare("q")

    def publish() -> None:
        desk.publish("q", "1", expiration=expiration)
        desk.depth("q")

    assert desk.error(publish) == 406
    assert desk.depth("q") == 0


def look_until_gone(desk: Desk) -> None:
    # Each declaration uses the queue, so wait longer and longer between two of them until the queue expires.
    pause = 0.5
    while pause < PATIENCE:
        time.sleep(pause)
        desk.depth("q")
        pause *= 2


def test_an_unused_queue_is_deleted_after_x_expires(desk: Desk) -> None:
    desk.declare("q", x_expires=200)
    desk.publish("q", "1")
    assert desk.error(lambda: look_until_gone(desk)) == 404


def test_a_consumer_prevents_the_expiry_of_a_queue(desk: Desk) -> None:
    tag = None
    while tag is None:
        desk.declare("q", x_expires=200)
        try:
            tag = desk.channel.basic_consume(desk.name("q"), lambda *_: None)
        except ChannelClosedByBroker:
            # On a slow machine the queue may have expired before.
            desk.channel = desk.connection.channel()
    time.sleep(0.6)
    assert desk.depth("q") == 0
    desk.channel.basic_cancel(tag)
    assert desk.error(lambda: look_until_gone(desk)) == 404


def test_rejected_expired_and_overflowing_messages_go_to_the_dead_letter_exchange_with_the_reason(desk: Desk) -> None:
    desk.declare("dead")
    to_dead = {"x_dead_letter_exchange": "", "x_dead_letter_routing_key": desk.name("dead")}
    desk.declare("rejected", **to_dead)
    desk.declare("expired", x_message_ttl=10, **to_dead)
    desk.declare("full", x_max_length=0, **to_dead)
    desk.publish("rejected", "r", headers={"mine": 1})
    desk.channel.basic_nack(desk.channel.basic_get(desk.name("rejected"))[0].delivery_tag, requeue=False)
    desk.wait_depth("dead", 1)
    desk.publish("expired", "e", expiration="60000")
    desk.wait_depth("dead", 2)
    desk.publish("full", "f")
    desk.wait_depth("dead", 3)

    def death(reason: str, **more: str) -> tuple[Any, ...]:
        queue = {"maxlen": "full"}.get(reason, reason)
        told = {"count": 1, "reason": reason, "queue": queue, "exchange": "", "routing-keys": [queue], **more}
        return ("dead", ""), None, [reason, queue, ""], [told]

    assert desk.deaths("dead") == [
        ("r", *death("rejected")),
        ("e", *death("expired", **{"original-expiration": "60000"})),
        ("f", *death("maxlen")),
    ]


def test_a_dead_letter_keeps_its_routing_key_and_x_death_counts_its_deaths(desk: Desk) -> None:
    exchange = desk.name("x")
    desk.channel.exchange_declare(exchange, "fanout", auto_delete=True)
    desk.declare("work", x_dead_letter_exchange=exchange)
    desk.declare("pause", x_message_ttl=10, x_dead_letter_exchange="")
    desk.channel.queue_bind(desk.name("pause"), exchange)
    desk.publish("work", "1")
    for round_number in (1, 2, 3):
        desk.wait_depth("work", 1)
        method, properties, body = desk.channel.basic_get(desk.name("work"))
        assert (desk.plain(method.routing_key), body) == ("work", b"1")
        deaths = (properties.headers or {}).get("x-death", [])
        assert [(death["reason"], desk.plain(death["queue"]), death["count"]) for death in deaths] == (
            [("expired", "pause", round_number - 1), ("rejected", "work", round_number - 1)] if round_number > 1 else []
        )
        desk.channel.basic_reject(method.delivery_tag, requeue=False)


def test_a_message_that_expires_again_in_a_dead_letter_cycle_is_dropped(desk: Desk) -> None:
    desk.declare("a", x_message_ttl=10, x_dead_letter_exchange="", x_dead_letter_routing_key=desk.name("b"))
    desk.declare("b", x_message_ttl=10, x_dead_letter_exchange="", x_dead_letter_routing_key=desk.name("a"))
    desk.declare("self", x_message_ttl=10, x_dead_letter_exchange="")
    desk.publish("a", "1")
    desk.publish("self", "2")
    # Check several times, because a message that moves between two queues is in no queue for a moment.
    empty, end = 0, time.monotonic() + PATIENCE
    while empty < 5:
        assert time.monotonic() < end, "it goes round"
        time.sleep(0.05)
        empty = 0 if any(desk.depth(name) for name in ("a", "b", "self")) else empty + 1


def test_dead_letters_for_a_missing_exchange_are_lost(desk: Desk) -> None:
    desk.declare("q", x_max_length=1, x_dead_letter_exchange=desk.name("nowhere"))
    desk.publish("q", "1", "2")
    assert desk.drain("q") == ["2"]


def test_with_a_single_active_consumer_only_the_oldest_consumer_is_served_until_it_is_cancelled(desk: Desk) -> None:
    desk.declare("q", x_single_active_consumer=True)
    seen: list[str] = []

    def consume(tag: str) -> None:
        desk.channel.basic_consume(desk.name("q"), lambda *_: seen.append(tag), consumer_tag=tag, auto_ack=True)

    consume("first")
    consume("second")
    desk.publish("q", "1", "2", "3")
    desk.wait_for(lambda: len(seen) == 3)
    desk.channel.basic_cancel("first")
    desk.publish("q", "4")
    desk.wait_for(lambda: len(seen) == 4)
    assert seen == ["first"] * 3 + ["second"]


@pytest.mark.parametrize(
    "arguments",
    [
        {"x_max_length": -1},
        {"x_max_length": "1"},
        {"x_max_length_bytes": -1},
        {"x_overflow": "drop"},
        {"x_message_ttl": -1},
        {"x_message_ttl": "1"},
        {"x_expires": 0},
        {"x_dead_letter_exchange": 1},
        {"x_dead_letter_routing_key": "k"},
        {"x_single_active_consumer": 1},
    ],
)
def test_declaring_a_queue_with_an_invalid_argument_closes_the_channel_with_406(
    desk: Desk, arguments: dict[str, Any]
) -> None:
    assert desk.error(lambda: desk.declare("q", **arguments)) == 406


def test_the_counts_in_x_death_are_64_bit_integers(desk: Desk) -> None:
    desk.declare("dead")
    desk.declare("q", x_max_length=1, x_dead_letter_exchange="", x_dead_letter_routing_key=desk.name("dead"))
    desk.publish("q", "1", "2")
    desk.wait_depth("dead", 1)
    _, properties, _ = desk.channel.basic_get(desk.name("dead"), auto_ack=True)
    (death,) = properties.headers["x-death"]
    # pika has a special type for 64-bit integers.
    assert isinstance(death["count"], pika.compat.long)


@pytest.mark.parametrize("overflow", ["drop-head", "reject-publish"])
def test_x_overflow_decides_if_a_requeue_into_a_full_queue_drops_messages_or_exceeds_the_maximum(
    desk: Desk, overflow: str
) -> None:
    desk.declare("q", x_max_length=2, x_overflow=overflow)
    for body in ("1", "2", "3"):
        desk.publish("q", body)
        desk.channel.basic_get(desk.name("q"))
    desk.publish("q", "4")
    desk.channel.basic_nack(0, multiple=True, requeue=True)
    left = ["3", "4"] if overflow == "drop-head" else ["1", "2", "3", "4"]
    desk.wait_depth("q", len(left))
    assert desk.drain("q") == left


def test_unroutable_messages_go_to_the_alternate_exchange(desk: Desk) -> None:
    main, other = desk.name("main"), desk.name("other")
    desk.channel.exchange_declare(main, "direct", auto_delete=True, arguments={"alternate-exchange": other})
    desk.channel.exchange_declare(main, "direct", auto_delete=True, arguments={"alternate-exchange": other})
    desk.channel.exchange_declare(other, "fanout", auto_delete=True, internal=True)
    desk.channel.queue_bind(desk.declare("q"), main, "known")
    desk.channel.queue_bind(desk.declare("rest"), other)
    desk.channel.basic_publish(main, "known", b"1", mandatory=True)
    desk.channel.basic_publish(main, "unknown", b"2", mandatory=True)
    assert (desk.drain("q"), desk.drain("rest")) == (["1"], ["2"])
    assert desk.error(lambda: desk.channel.exchange_declare(main, "direct", auto_delete=True)) == 406


def test_an_alternate_exchange_that_is_not_a_string_closes_the_channel_with_406(desk: Desk) -> None:
    arguments = {"alternate-exchange": 1}
    assert desk.error(lambda: desk.channel.exchange_declare(desk.name("e"), arguments=arguments)) == 406


def test_using_an_exclusive_queue_of_another_connection_closes_the_channel_with_405(desk: Desk) -> None:
    name = desk.name("mine")
    other = pika.BlockingConnection(desk.parameters)
    other.channel().queue_declare(name, exclusive=True)
    for call in (
        lambda: desk.channel.queue_declare(name, passive=True),
        lambda: desk.channel.queue_declare(name),
        lambda: desk.channel.basic_get(name),
        lambda: desk.channel.basic_consume(name, lambda *_: None),
        lambda: desk.channel.queue_purge(name),
        lambda: desk.channel.queue_delete(name),
        lambda: desk.channel.queue_bind(name, "amq.fanout"),
    ):
        assert desk.error(call) == 405
    other.close()


def test_direct_reply_to_delivers_a_reply_without_a_reply_queue(desk: Desk) -> None:
    desk.declare("requests")
    replies: list[tuple[str, bytes]] = []

    def reply(_: Any, method: Any, properties: Any, body: bytes) -> None:
        replies.append((properties.correlation_id, body))
        assert (method.exchange, method.redelivered) == ("", False)

    desk.channel.basic_consume("amq.rabbitmq.reply-to", reply, auto_ack=True)
    desk.publish("requests", "question", reply_to="amq.rabbitmq.reply-to", correlation_id="1")
    server: Any = desk.connection.channel()
    _, properties, _ = server.basic_get(desk.name("requests"), auto_ack=True)
    assert properties.reply_to.startswith("amq.rabbitmq.reply-to.")
    found = server.queue_declare(properties.reply_to, passive=True).method
    assert (found.queue, found.message_count, found.consumer_count) == (properties.reply_to, 0, 1)
    answer = pika.BasicProperties(correlation_id=properties.correlation_id)
    server.basic_publish("", properties.reply_to, b"answer", answer, mandatory=True)
    desk.wait_for(lambda: replies == [("1", b"answer")])


def test_an_invalid_use_of_direct_reply_to_closes_the_channel(desk: Desk) -> None:
    def consume(*, auto_ack: bool) -> None:
        desk.channel.basic_consume("amq.rabbitmq.reply-to", lambda *_: None, auto_ack=auto_ack)

    desk.declare("requests")
    assert desk.error(lambda: consume(auto_ack=False)) == 406
    desk.channel.confirm_delivery()
    assert desk.error(lambda: desk.publish("requests", "1", reply_to="amq.rabbitmq.reply-to")) == 406
    consume(auto_ack=True)
    assert desk.error(lambda: consume(auto_ack=True)) == 406
    assert desk.error(lambda: desk.channel.queue_declare("amq.rabbitmq.reply-to.x", passive=True)) == 404
    assert desk.depth("requests") == 0
