from __future__ import annotations

import gc
import random
import ssl
import threading

import pytest
from pamqp import body, commands, frame, header

from qflow_client.broker import Broker
from qflow_client.broker.core.channel import Channel
from qflow_client.broker.core.deadletter import DeadLetters
from qflow_client.broker.core.server import Connection, Server
from qflow_client.broker.core.session import Session
from tests.certificates import certify
from tests.collecting import collect
from tests.integration.producer.tools import SteadyClock

PROTOCOL_HEADER = b"AMQP\0\0\x09\x01"


def works(client):
    """Check that the broker still serves this connection."""
    client.call(1, commands.Queue.Declare(queue="alive"), commands.Queue.DeclareOk)
    return True


def test_malformed_frames_on_one_connection_do_not_disturb_another_connection(broker, connect):
    good = connect(broker).open().channel()
    for data, code in (
        (b"\1\0\1\0\0\0\1x\0", 501),
        (b"\x09\0\0\0\0\0\0\xce", 501),
        (b"\1\0\1\xff\xff\xff\xff\0", 501),
        (b"\1\0\1\0\0\0\4\0\x3c\0\x28\xce", 502),
        (b"\1\0\0\0\0\0\4\0\x3c\0\x28\xce", 502),
        (b"\3\0\1\0\0\0\1x\xce", 505),
        (b"\1\0\7\0\0\0\4\0\x14\0\x29\xce", 504),
    ):
        bad = connect(broker).open().channel()
        bad.send_bytes(data)
        assert bad.expect(commands.Connection.Close).reply_code == code
        bad.send(0, commands.Connection.CloseOk())
        assert works(good)


def test_random_bytes_never_disturb_another_connection(broker, connect):
    good = connect(broker).open().channel()
    chance = random.Random(7)
    for _ in range(30):
        bad = connect(broker)
        if chance.random() < 0.7:
            bad.open().channel()
        bad.send_bytes(chance.randbytes(chance.randrange(1, 200)))
        bad.socket.close()
        assert works(good)
    broker.wait_until(lambda b: len(b.connections()) == 1)


def _sessions_and_channels(but=()):
    known = {id(each) for each in but}
    return [each for each in gc.get_objects() if type(each) in (Session, Channel) and id(each) not in known]


def test_a_closed_connection_is_freed_without_the_garbage_collector(broker, connect):
    kept = connect(broker).open().channel()
    collect()
    gc.disable()
    try:
        # Keep these objects, so that no new object gets the id of one of them.
        before = _sessions_and_channels()
        with connect(broker) as client:
            client.open().channel(confirms=True)
            client.call(1, commands.Queue.Declare(queue="q", exclusive=True), commands.Queue.DeclareOk)
            client.call(1, commands.Basic.Consume(queue="q"), commands.Basic.ConsumeOk)
            client.publish()
            broker.wait_until(lambda b: b.queue("q").delivered == 1)
            assert len(_sessions_and_channels(before)) == 2
        # The broker's loop keeps its last callback until it calls another one.
        broker.wait_until(lambda b: works(kept) and not _sessions_and_channels(before))
    finally:
        gc.enable()


def test_a_connection_that_does_not_complete_the_handshake_in_time_is_closed(connect, stop_clock):
    with Broker(unauthenticated_timeout=0.1) as broker:
        resume_clock = stop_clock(broker)
        silent, greeting = connect(broker), connect(broker)
        greeting.send_bytes(PROTOCOL_HEADER)
        greeting.expect(commands.Connection.Start)
        opened = connect(broker).open().channel()
        resume_clock()
        assert silent.is_over()
        assert greeting.is_over()
        assert works(opened)


def test_a_client_that_does_not_answer_connection_close_is_disconnected_even_without_heartbeats(connect):
    with Broker(unauthenticated_timeout=60, close_timeout=0.1) as broker:
        client = connect(broker).open(heartbeat=0)
        broker.close_connections()
        client.expect(commands.Connection.Close)
        assert client.is_over()


def publishes(size):
    """Return frames of publishes with about `size` bytes. Tests use them as data in flight."""
    body_size = 10_000
    one = b"".join(
        frame.marshal(each, 1)
        for each in (
            commands.Basic.Publish(routing_key="q"),
            header.ContentHeader(body_size=body_size),
            body.ContentBody(bytes(body_size)),
        )
    )
    return one * (size // len(one))


def is_reset(client):
    """Wait until the broker has closed its socket, and not only its side of the stream."""
    try:
        while True:
            client.send_bytes(bytes(1000))
    except OSError:
        return True


@pytest.fixture
def is_sent(monkeypatch):
    """An event that the test sets when its client has sent everything. Until then no client counts as quiet."""
    is_sent = threading.Event()
    when_quiet = Connection._when_quiet

    def when_sent_and_quiet(self, end, received=None):
        when_quiet(self, end, received if is_sent.is_set() else None)

    monkeypatch.setattr(Connection, "_when_quiet", when_sent_and_quiet)
    return is_sent


# More bytes than the buffers of the sockets hold. The client can send the last bytes only if the broker reads on.
UNDER_WAY = publishes(30_000_000)
CLOSE = frame.marshal(commands.Connection.Close(200, "", 0, 0), 0)


def test_E11_close_ok_arrives_even_if_the_client_still_has_megabytes_in_flight(broker, connect):
    client = connect(broker).open().channel()
    client.send_bytes(CLOSE + UNDER_WAY)
    client.expect(commands.Connection.CloseOk)
    with pytest.raises(EOFError):
        client.read()
    assert broker.connections() == ()


def test_E11_close_ok_arrives_over_tls_even_if_the_client_still_has_megabytes_in_flight(certificate, connect, is_sent):
    with Broker(ssl_context=server_context(certificate), close_timeout=3600) as broker:
        trusting = ssl.create_default_context(cafile=certificate[0])
        client = connect(broker, wrap=lambda plain: trusting.wrap_socket(plain, server_hostname="localhost"))
        client.open().channel().send_bytes(CLOSE + UNDER_WAY)
        is_sent.set()
        client.expect(commands.Connection.CloseOk)
        assert broker.connections() == ()
        # A client that waits until the broker has closed need not wait for the close timeout.
        with pytest.raises(EOFError):
            client.read()


def test_E11_connection_close_arrives_even_if_the_client_still_has_megabytes_in_flight(broker, connect):
    client = connect(broker).open().channel()
    broker.close_connections()
    close_ok = frame.marshal(commands.Connection.CloseOk(), 0)
    # Frames that wait on channels may also follow the answer.
    client.send_bytes(UNDER_WAY + close_ok + UNDER_WAY)
    assert client.expect(commands.Connection.Close).reply_code == 320
    with pytest.raises(EOFError):
        client.read()


def test_E11_the_protocol_header_arrives_even_if_megabytes_of_another_protocol_are_in_flight(broker, connect):
    client = connect(broker)
    client.send_bytes(b"POST / HTTP/1.1\r\n\r\n" + bytes(30_000_000))
    assert client.read_bytes(8) == PROTOCOL_HEADER
    with pytest.raises(EOFError):
        client.read_bytes(1)


def test_E11_a_broker_that_stops_continues_to_read_until_connection_close_has_arrived(connect, is_sent, monkeypatch):
    def produce():
        try:
            client.send_bytes(UNDER_WAY)
        finally:
            is_sent.set()

    monkeypatch.setattr(Server, "STOP_GRACE", 20.0)
    with Broker() as broker:
        client = connect(broker).open().channel()
        producer = threading.Thread(target=produce)
        producer.start()
        broker.wait_until(lambda b: b.connections()[0].bytes_received > 1_000_000)
    producer.join()
    assert client.expect(commands.Connection.Close).reply_code == 320
    with pytest.raises(EOFError):
        client.read()


def test_closed_connections_do_not_count_towards_max_connections_even_if_their_sockets_stay_open(connect):
    with Broker(max_connections=2, close_timeout=3600) as broker:
        clients = [connect(broker).open() for _ in range(2)]
        for _ in range(3):
            for client in clients[-2:]:
                client.call(0, commands.Connection.Close(200, "", 0, 0), commands.Connection.CloseOk)
            clients += [connect(broker).open() for _ in range(2)]
        broker.wait_until(lambda b: len(b.connections()) == 2)
        assert is_refused(connect(broker))


def test_a_stop_of_the_broker_does_not_wait_for_clients_that_keep_their_sockets_open(connect):
    with Broker(close_timeout=3600) as broker:
        quiet, finished = (connect(broker).open().channel() for _ in range(2))
        finished.call(0, commands.Connection.Close(200, "", 0, 0), commands.Connection.CloseOk)
    assert quiet.expect(commands.Connection.Close).reply_code == 320


def test_a_client_that_does_not_close_its_socket_after_close_ok_is_disconnected(connect):
    with Broker(close_timeout=0.1) as broker:
        client = connect(broker).open().channel()
        client.call(0, commands.Connection.Close(200, "", 0, 0), commands.Connection.CloseOk)
        assert is_reset(client)


def test_E9_the_close_timeout_does_not_apply_to_a_client_that_missed_the_handshake_deadline(connect):
    with Broker(unauthenticated_timeout=0.1, close_timeout=3600) as broker:
        client = connect(broker)
        assert client.is_over()
        assert is_reset(client)


def test_an_exception_in_the_trace_function_ends_only_the_connection_of_the_traced_frame(connect):
    def trace(direction, connection, channel, name):
        if (connection, name) == (bad.name, "Connection.Blocked"):
            raise RuntimeError("no luck")

    with Broker(trace=trace) as broker:
        bad = connect(broker)
        bad.open()
        good = connect(broker).open().channel()
        # The broker notifies both clients in one turn of its loop, the bad client first.
        broker.block()
        good.expect(commands.Connection.Blocked)
        assert bad.is_over()
        assert works(good)


def test_the_broker_sends_heartbeats_and_disconnects_a_client_that_sends_none(connect, monkeypatch):
    with Broker() as broker:
        monkeypatch.setattr(broker._server, "clock", SteadyClock())
        client = connect(broker).open(heartbeat=1)
        beats = 0
        try:
            while True:
                assert client.read()[1].name == "Heartbeat"
                beats += 1
        except (EOFError, ConnectionResetError):
            pass
        assert beats >= 2
        broker.wait_until(lambda b: b.connections() == ())


def is_refused(client):
    """Return whether the broker refuses the connection with 530 and a text that names the limit and its setting."""
    client.send_bytes(PROTOCOL_HEADER)
    client.expect(commands.Connection.Start)
    start_ok = commands.Connection.StartOk({}, "PLAIN", "\0guest\0guest", "en_US")
    client.call(0, start_ok, commands.Connection.Tune)
    client.send(0, commands.Connection.TuneOk(0, 0, 0), commands.Connection.Open("/"))
    close = client.expect(commands.Connection.Close)
    return close.reply_code == 530 and "limit of connections is reached (max_connections=2)" in close.reply_text


def test_connections_beyond_max_connections_are_refused_with_530_as_on_rabbitmq(connect):
    with Broker(max_connections=2) as broker:
        kept = [connect(broker).open().channel() for _ in range(2)]
        assert is_refused(connect(broker))
        assert all(works(client) for client in kept)
        kept[0].socket.close()
        broker.wait_until(lambda b: len(b.connections()) == 1)
        connect(broker).open()


def test_beyond_the_limit_max_unauthenticated_only_the_oldest_unopened_connections_are_closed(connect):
    with Broker(max_unauthenticated=2, unauthenticated_timeout=3600) as broker:
        kept = [connect(broker).open().channel() for _ in range(3)]
        strangers = [connect(broker) for _ in range(3)]
        assert strangers[0].is_over()
        assert all(works(client) for client in kept)
        kept.append(strangers[2].open().channel())
        kept.append(strangers[1].open().channel())
        strangers = [connect(broker) for _ in range(50)]
        assert all(stranger.is_over() for stranger in strangers[:-2])
        kept.append(strangers[-2].open().channel())
        assert all(works(client) for client in kept)


def test_J8_messages_for_a_consumer_that_does_not_read_stay_in_the_queue(broker, connect):
    broker.declare_queue("q")
    client = connect(broker).open().channel()
    client.send(1, commands.Basic.Consume(queue="q", consumer_tag="c", no_ack=True))
    client.expect(commands.Basic.ConsumeOk)
    for _ in range(200):
        broker.publish(b"x" * 100_000, "q")
    assert broker.queue("q").depth > 50
    for _ in range(200):
        client.expect(commands.Basic.Deliver)
        client.read()
        client.read()
    broker.wait_until(lambda b: b.queue("q").depth == 0)


def test_E6_the_broker_creates_answers_only_as_fast_as_the_client_reads_them(broker, connect):
    broker.declare_queue("q")
    broker.publish(bytes(1 << 20), "q")
    client = connect(broker).open().channel()
    count = 200
    client.send(
        1,
        *(
            each
            for tag in range(count)
            for each in (commands.Basic.Get(queue="q"), commands.Basic.Nack(tag + 1, requeue=True))
        ),
    )
    for number in range(count):
        assert client.expect(commands.Basic.GetOk).delivery_tag == number + 1
        # The buffers of the sockets and the connection contain some answers. The broker has not created the others yet.
        assert broker.queue("q").delivered - number < 100
        size = client.expect(header.ContentHeader).body_size
        while size:
            size -= len(client.expect(body.ContentBody))
    assert works(client)


@pytest.mark.parametrize("goes_on", [True, False], ids=["sends more", "waits"])
def test_E9_a_client_that_waits_for_its_dead_letters_is_read_again(connect, monkeypatch, goes_on):
    monkeypatch.setattr(DeadLetters, "AT_ONCE", 2)
    # No timer of the connection may read the client again.
    with Broker(unauthenticated_timeout=600) as broker:
        broker.declare_queue("dead")
        broker.declare_queue("q", arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"})
        for _ in range(50):
            broker.publish(b"x", "q")
        client = connect(broker).open().channel()
        client.send(1, *[commands.Basic.Get(queue="q") for _ in range(50)])
        for _ in range(50):
            client.expect(commands.Basic.GetOk)
            client.read()
            client.read()
        declare = commands.Queue.Declare(queue="dead", passive=True)
        client.send(1, commands.Basic.Nack(0, multiple=True, requeue=False), *([declare] if goes_on else []))
        if not goes_on:
            # The broker has read the Nack before, because it counts no more unacked messages.
            broker.wait_until(lambda b: b.queue("q").unacked == 0)
            client.send(1, declare)
        assert client.expect(commands.Queue.DeclareOk).message_count == 50
        assert works(client)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    return certify(tmp_path_factory.mktemp("tls"))


def server_context(certificate):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)
    return context


def test_clients_can_connect_with_tls(certificate, connect):
    with Broker(ssl_context=server_context(certificate)) as broker:
        assert broker.url.startswith("amqps://")
        trusting = ssl.create_default_context(cafile=certificate[0])
        client = connect(broker, wrap=lambda plain: trusting.wrap_socket(plain, server_hostname="localhost"))
        assert works(client.open().channel())
        client.call(0, commands.Connection.Close(200, "", 0, 0), commands.Connection.CloseOk)


def test_E9_an_unauthenticated_client_is_disconnected_in_time_even_after_a_wrong_protocol_header(connect, stop_clock):
    with Broker(unauthenticated_timeout=0.5, close_timeout=60) as broker:
        # The 0.5 s begin with the answer to the header, however long the client takes to send it.
        stop_clock(broker)
        stranger = connect(broker)
        stranger.send_bytes(b"GET / HTTP/1.1\r\n")
        assert stranger.read_bytes(8) == PROTOCOL_HEADER
        with pytest.raises(EOFError):
            stranger.read_bytes(1)
        # The client does not close its side.
        broker.wait_until(lambda broker: not broker._server.connections, timeout=30)
