"""Valid sessions with random changes. They must not affect other connections and must leave nothing behind."""

from __future__ import annotations

import logging
import random
import socket
import struct
from typing import Any

import pytest
from pamqp import body, commands, frame, header
from pamqp.commands import Basic, Channel, Confirm, Connection, Exchange, Queue, Tx

from tests.effort import rounds

PROTOCOL_HEADER = b"AMQP\0\0\x09\x01"
SESSIONS = rounds(400)
PROPERTIES = Basic.Properties(
    content_type="text/plain",
    headers={"k": [1, "two", {"three": None}], "float": 1.5, "true": True, "raw": bytearray(b"raw")},
    delivery_mode=2,
    correlation_id="c",
    expiration="1000",
    message_id="m",
    user_id="guest",
)
QUEUES: dict[str, dict[str, Any]] = {
    "plain": {},
    "counted": {"qpid.flow_stop_count": 3, "qpid.flow_resume_count": 2},
    "sized": {"x-qpid-capacity": 400, "x-qflow-enforcement": "completion"},
    "small": {"qpid.max_count": 3},
    "ring": {"qpid.max_size": 500, "qpid.policy_type": "ring"},
    "waits": {"x-qflow-policy": "wait", "qpid.max_count": 2},
    "values": {"x-qflow-policy": "conflate", "x-qflow-conflate-key": "float", "x-qflow-max-flow-wait": 0.01},
    "mortal": {
        "x-message-ttl": 5,
        "x-max-length": 3,
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": "dead",
    },
    "dead": {"x-max-length-bytes": 400, "x-overflow": "reject-publish-dlx", "x-dead-letter-exchange": "e"},
}
EXCHANGES = ["", "amq.topic", "amq.headers", "e"]
METHODS = [index for index in commands.INDEX_MAPPING if index >> 16 != 10]


def publish(chance):
    queue, exchange = chance.choice(list(QUEUES)), chance.choice(EXCHANGES)
    content = bytes(chance.randrange(250))
    yield Basic.Publish(exchange=exchange, routing_key=queue, mandatory=chance.random() < 0.3)
    yield header.ContentHeader(body_size=len(content), properties=chance.choice([None, PROPERTIES]))
    for at in range(0, len(content), 100):
        yield body.ContentBody(content[at : at + 100])


def topology(chance):
    for queue, arguments in QUEUES.items():
        yield Queue.Declare(queue=queue, arguments=arguments)
        yield Queue.Bind(queue=queue, exchange=chance.choice(EXCHANGES[1:3]), routing_key="#", arguments={"k": [1]})
    yield Exchange.Declare(exchange="e", exchange_type="fanout", auto_delete=True)
    yield Exchange.Bind(destination="amq.headers", source="e")


def producer(chance):
    yield Confirm.Select()
    for _ in range(chance.randrange(1, 10)):
        yield from publish(chance)


def transactions(chance):
    yield Tx.Select()
    for _ in range(chance.randrange(1, 4)):
        yield Basic.Get(queue="plain")
        yield from publish(chance)
        yield from publish(chance)
        yield chance.choice([Tx.Commit(), Tx.Rollback()])


def consumer(chance):
    queue = chance.choice(list(QUEUES))
    yield Basic.Qos(prefetch_count=chance.randrange(4), global_=chance.random() < 0.5)
    yield Basic.Consume(queue=queue, consumer_tag="t")
    yield Basic.Consume(queue=chance.choice(list(QUEUES)), no_ack=True)
    for tag in range(1, chance.randrange(5)):
        requeue = chance.random() < 0.5
        yield Basic.Get(queue=queue)
        yield chance.choice([Basic.Ack(tag), Basic.Nack(tag, requeue=requeue), Basic.Reject(tag, requeue=requeue)])
    yield Basic.Recover(requeue=chance.random() < 0.5)
    yield Channel.Flow(active=chance.random() < 0.5)
    yield Basic.Ack(0, multiple=True)
    yield Basic.Cancel(consumer_tag="t")


def administrator(chance):
    yield chance.choice([Queue.Purge(queue="counted"), Queue.Delete(queue=chance.choice(list(QUEUES)))])
    yield Queue.Declare(queue="", exclusive=True)
    yield Basic.Consume(queue="")
    yield Channel.Close(200, "", 0, 0)


def valid_session(chance):
    capabilities: dict[str, Any] = {"capabilities": {"consumer_cancel_notify": True, "connection.blocked": True}}
    opening = (
        Connection.StartOk(capabilities, "PLAIN", "\0guest\0guest", "en_US"),
        Connection.TuneOk(0, chance.choice([0, 4096]), 0),
        Connection.Open("/"),
    )
    pieces = [PROTOCOL_HEADER, *(frame.marshal(method, 0) for method in opening)]
    roles = [topology, *chance.choices([producer, transactions, consumer, administrator], [4, 2, 4, 1], k=4)]
    for number, role in enumerate(roles, 1):
        pieces += [frame.marshal(each, number) for each in (Channel.Open(), *role(chance))]
    return pieces


def change(chance, pieces):
    at = chance.randrange(len(pieces))
    piece = pieces[at]
    # Choose a position in the payload, if the frame has a payload.
    inside = chance.randrange(7, len(piece) - 1) if len(piece) > 8 else 0
    extreme = chance.choice([b"\0", b"\xff", b"\x7f", chance.randbytes(1)]) * chance.choice([1, 2, 4])
    match chance.randrange(10):
        case 0:
            del pieces[at]
        case 1:
            pieces.insert(at, piece)
        case 2:
            other = chance.randrange(len(pieces))
            pieces[at], pieces[other] = pieces[other], piece
        case 3:
            pieces.insert(at, chance.randbytes(chance.randrange(1, 40)))
        case 4:
            pieces[at] = piece[: chance.randrange(len(piece) + 1)]
        case 5:
            pieces[at] = piece[:1] + struct.pack(">H", chance.choice([0, 1, 2, 3, 65535])) + piece[3:]
        case 6 if inside:
            pieces[at] = piece[:7] + struct.pack(">I", chance.choice(METHODS)) + piece[11:]
        case 7 if inside:
            pieces[at] = sized(piece[:inside] + extreme + piece[inside:])
        case 8 if inside:
            pieces[at] = sized(piece[:inside] + piece[chance.randrange(inside, len(piece) - 1) :])
        case _:
            pieces[at] = piece[:inside] + extreme + piece[inside + len(extreme) :]
    if not pieces:
        pieces.append(b"")


def sized(piece):
    """Return a frame with the correct length in its header."""
    return piece[:3] + struct.pack(">I", len(piece) - 8) + piece[7:]


@pytest.mark.parametrize("seed", [1, 2])
def test_randomly_changed_sessions_disturb_no_other_connection_and_leave_nothing_in_the_broker(
    broker, connect, caplog, seed
):
    chance = random.Random(seed)
    good = connect(broker).open().channel(confirms=True)
    good.call(1, Queue.Declare(queue="good", exclusive=True), Queue.DeclareOk)
    with caplog.at_level(logging.ERROR):
        for number in range(SESSIONS):
            pieces = valid_session(chance)
            for _ in range(chance.choice([0, 1, 1, 2, 5])):
                change(chance, pieces)
            bad = connect(broker)
            try:
                bad.send_bytes(b"".join(pieces))
                if chance.random() < 0.5:
                    bad.socket.shutdown(socket.SHUT_WR)
                    while bad.socket.recv(65536):
                        pass
            except (BrokenPipeError, ConnectionResetError):
                pass
            bad.socket.close()
            good.publish(b"%d" % number, "good")
            assert good.expect(Basic.Ack).delivery_tag == number + 1
        broker.wait_until(lambda b: len(b.connections()) == 1)
    assert caplog.records == []
    assert broker.queue("good").depth == SESSIONS
    for queue in broker.queues():
        assert (queue.unacked, queue.consumers, queue.blocked) == (0, 0, ())
        # Messages may expire between the two calls, so compare repeatedly.
        broker.wait_until(lambda b, name=queue.name: counts_right(b, name))


def counts_right(broker, name):
    queue, messages = broker.queue(name), broker.messages(name)
    return (queue.depth, queue.bytes) == (len(messages), sum(len(message.body) for message in messages))
