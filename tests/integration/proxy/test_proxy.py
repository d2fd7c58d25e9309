"""The fault proxy between plain sockets."""

from __future__ import annotations

import errno
import signal
import socket
import struct
import threading
import time
from contextlib import ExitStack

import pamqp.commands
import pamqp.frame
import pytest

from qflow_client.testing import proxy as proxy_module
from qflow_client.testing.proxy import FaultProxy
from qflow_client.testing.relay import End
from tests.integration.producer.processes import in_child, waiting_child

PATIENCE = 20.0
FLOW = pamqp.frame.marshal(pamqp.commands.Channel.Flow(False), 1)


def frame(payload: bytes) -> bytes:
    return struct.pack(">BHI", 3, 1, len(payload)) + payload + b"\xce"


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def listener(stack):
    return stack.enter_context(socket.create_server(("127.0.0.1", 0)))


@pytest.fixture
def proxy(stack, listener):
    return stack.enter_context(FaultProxy(f"127.0.0.1:{listener.getsockname()[1]}", seed=1))


@pytest.fixture
def dial(stack, listener, proxy):
    """Makes a connection by way of the proxy: the client's socket and the broker's."""

    def dial() -> tuple[socket.socket, socket.socket]:
        client = stack.enter_context(socket.create_connection(("127.0.0.1", proxy.port), timeout=PATIENCE))
        broker = stack.enter_context(listener.accept()[0])
        broker.settimeout(PATIENCE)
        # It may have been accepted before the proxy knows.
        proxy.wait_until(lambda proxy: not proxy.connections or proxy.connections[-1].name_at_broker)
        return client, broker

    return dial


def read(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        assert piece, f"the end after {data!r}"
        data += piece
    return data


def to_the_end(sock: socket.socket) -> bytes:
    return b"".join(iter(lambda: sock.recv(100), b""))


def has_nothing(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return not sock.recv(1, socket.MSG_PEEK) and False
    except BlockingIOError:
        return True
    finally:
        sock.settimeout(PATIENCE)


def ends(sock: socket.socket) -> str:
    """How a connection ends: in order, or by a reset."""
    try:
        while sock.recv(65536):
            pass
    except ConnectionResetError:
        return "reset"
    return "end"


def test_all_bytes_pass_the_proxy_unchanged_in_both_directions(dial, proxy):
    client, broker = dial()
    data = bytes(range(256)) * 4000
    for source, target in ((client, broker), (broker, client)):
        sender = threading.Thread(target=source.sendall, args=(data,))
        sender.start()
        assert read(target, len(data)) == data
        sender.join()
    (picture,) = proxy.connections
    assert (picture.bytes_to_broker, picture.bytes_to_client) == (len(data), len(data))
    assert picture.client == "{}:{}".format(*client.getsockname())
    assert picture.name_at_broker == "{}:{}".format(*broker.getpeername())


def test_the_proxy_passes_the_end_of_one_direction_on_in_order_and_the_other_direction_continues(dial, proxy):
    client, broker = dial()
    client.sendall(b"last words")
    client.shutdown(socket.SHUT_WR)
    assert read(broker, 10) == b"last words"
    assert broker.recv(1) == b""
    broker.sendall(b"answer")
    assert read(client, 6) == b"answer"
    broker.close()
    assert client.recv(1) == b""
    proxy.wait_until(lambda proxy: not proxy.connections)


def test_the_proxy_refuses_to_wait_for_a_coroutine(proxy):
    async def is_empty(proxy: FaultProxy) -> bool:
        return not proxy.connections

    # A lambda is not a coroutine function, but its result can be a coroutine.
    for predicate in (is_empty, lambda proxy: is_empty(proxy)):
        with pytest.raises(TypeError, match="use a plain function"):
            proxy.wait_until(predicate)


def test_the_proxy_passes_a_tcp_reset_on(dial, proxy):
    client, broker = dial()
    client.sendall(b"x")
    read(broker, 1)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    assert ends(broker) == "reset"
    proxy.wait_until(lambda proxy: not proxy.connections)


def test_the_proxy_resets_a_client_if_the_broker_cannot_be_reached(listener, proxy):
    listener.close()
    # It may come before the client has done anything.
    with (
        pytest.raises(ConnectionResetError),
        socket.create_connection(("127.0.0.1", proxy.port), timeout=PATIENCE) as client,
    ):
        client.recv(1)


def test_the_fault_cut_ends_the_connections_of_both_sides(dial, proxy):
    client, broker = dial()
    proxy.cut()
    assert (ends(client), ends(broker)) == ("end", "end")
    proxy.wait_until(lambda proxy: not proxy.connections)


def test_the_fault_reset_resets_the_connections_of_both_sides(dial, proxy):
    client, broker = dial()
    proxy.reset()
    assert (ends(client), ends(broker)) == ("reset", "reset")


def test_the_methods_of_a_proxy_raise_an_error_in_a_forked_child(proxy):
    def check() -> None:
        for call in (proxy.cut, proxy.stall, lambda: proxy.connections, lambda: proxy.wait_until(lambda _: True)):
            with pytest.raises(RuntimeError, match="the proxy runs in process"):
                call()

    in_child(check)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("listens", [False, True])
def test_an_interrupt_while_a_proxy_starts_also_ends_the_thread_of_the_proxy(monkeypatch, listens):
    listen = FaultProxy._listen

    def listen_interrupted(proxy):
        if listens:
            listen(proxy)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        if not listens:
            listen(proxy)

    monkeypatch.setattr(FaultProxy, "_listen", listen_interrupted)
    proxy, before = FaultProxy("localhost:1"), set(threading.enumerate())
    # A shell starts background jobs with SIGINT ignored.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            proxy.__enter__()
    finally:
        signal.signal(signal.SIGINT, handler)
    assert set(threading.enumerate()) <= before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", proxy._port))


def test_a_forked_child_does_not_keep_the_sockets_of_a_proxy_open(dial, proxy):
    for fault, end in ((proxy.cut, "end"), (proxy.reset, "reset")):
        client, broker = dial()
        with waiting_child():
            fault()
            assert ends(client) == ends(broker) == end
    with waiting_child():
        proxy.refuse()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", proxy.port), timeout=PATIENCE)


def test_a_proxy_fault_can_apply_to_one_connection_only(dial, proxy):
    first, second = dial(), dial()
    proxy.cut(connection=1)
    assert ends(first[0]) == "end"
    second[0].sendall(b"goes on")
    assert read(second[1], 7) == b"goes on"
    with pytest.raises(LookupError, match="there is no connection 1; the proxy has: 2"):
        proxy.cut(connection=1)


def test_bytes_stalled_by_the_proxy_continue_after_the_stall_and_the_sender_notices_the_stall(dial, proxy):
    client, broker = dial()
    proxy.stall("to_broker")
    client.setblocking(False)
    sent = 0
    # Until the proxy's and the system's buffers are full: it reads nothing.
    stopped_at = time.monotonic() + 0.3
    while time.monotonic() < stopped_at:
        try:
            sent += client.send(bytes(65536))
            stopped_at = time.monotonic() + 0.3
        except BlockingIOError:
            time.sleep(0.01)
    assert sent < 16 << 20
    assert has_nothing(broker)
    broker.sendall(b"the other way is open")
    client.settimeout(PATIENCE)
    read(client, 21)
    proxy.heal()
    assert read(broker, sent) == bytes(sent)


def test_a_stall_of_the_proxy_also_applies_to_later_connections(dial, proxy):
    proxy.stall("to_client")
    client, broker = dial()
    broker.sendall(b"x")
    client.sendall(b"y")
    assert read(broker, 1) == b"y"
    assert has_nothing(client)
    proxy.heal()
    assert read(client, 1) == b"x"


def test_the_fault_black_hole_discards_all_bytes_and_neither_side_notices(dial, proxy):
    client, broker = dial()
    proxy.black_hole()
    client.sendall(bytes(1 << 20))
    client.close()
    broker.sendall(bytes(1 << 20))
    proxy.wait_until(lambda proxy: proxy.connections[0].bytes_swallowed == 2 << 20)
    assert has_nothing(broker)
    # What was swallowed is missing, so nothing that follows could make sense.
    proxy.heal()
    broker.sendall(b"x")
    assert len(proxy.connections) == 1
    proxy.cut()
    assert ends(broker) in ("end", "reset")


def test_a_connection_into_a_black_hole_is_accepted_and_never_answered_even_without_a_broker(listener, proxy):
    listener.close()
    proxy.black_hole()
    with socket.create_connection(("127.0.0.1", proxy.port)) as client:
        client.sendall(b"AMQP\0\0\x09\x01")
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.recv(1)
        proxy.wait_until(lambda proxy: proxy.connections)
        (picture,) = proxy.connections
        assert picture.name_at_broker == ""


def test_the_fault_black_hole_also_discards_bytes_in_flight(dial, proxy):
    client, broker = dial()
    proxy.delay(60.0)
    client.sendall(b"on its way")
    broker.sendall(b"likewise")
    proxy.black_hole()
    proxy.wait_until(lambda proxy: proxy.connections[0].bytes_swallowed == 18)
    proxy.heal()
    assert has_nothing(broker)
    assert has_nothing(client)


def test_the_proxy_passes_bytes_on_that_are_sent_after_the_fault_black_hole_has_ended(dial, proxy):
    client, broker = dial()
    proxy.black_hole()
    proxy.heal()
    client.sendall(b"x")
    assert read(broker, 1) == b"x"


def test_bytes_that_the_proxy_delays_arrive_later_and_in_order(dial, proxy):
    client, broker = dial()
    proxy.delay(0.05, jitter=0.05)
    began = time.monotonic()
    for number in range(100):
        client.sendall(b"%04d" % number)
    assert read(broker, 400) == b"".join(b"%04d" % number for number in range(100))
    assert time.monotonic() - began >= 0.05
    began = time.monotonic()
    broker.sendall(b"x")
    read(client, 1)
    assert time.monotonic() - began >= 0.05


def test_a_long_delay_of_the_proxy_does_not_limit_the_bandwidth(dial, proxy):
    client, broker = dial()
    proxy.delay(0.2)
    data = bytes(8 << 20)
    began = time.monotonic()
    client.sendall(data)
    # All of it is on its way at once: more than the sockets hold. What a socket holds at a time would take 25 seconds.
    assert read(broker, len(data)) == data
    assert time.monotonic() - began < 20


def test_the_proxy_can_limit_the_average_bandwidth(dial, proxy):
    client, broker = dial()
    proxy.limit(100_000, direction="to_broker")
    began = time.monotonic()
    client.sendall(bytes(50_000))
    read(broker, 50_000)
    assert time.monotonic() - began >= 0.45
    proxy.heal()
    began = time.monotonic()
    # Which took ten seconds otherwise.
    client.sendall(bytes(1_000_000))
    read(broker, 1_000_000)
    assert time.monotonic() - began < 9


@pytest.fixture
def sizes(monkeypatch) -> list[int]:
    """Of what the proxy writes; a socket may receive several of them at once."""
    sizes: list[int] = []
    write = End.write

    def note(end, data):
        sizes.append(len(data))
        write(end, data)

    monkeypatch.setattr(End, "write", note)
    return sizes


def test_the_proxy_can_pass_bytes_on_one_at_a_time(dial, proxy, sizes):
    client, broker = dial()
    proxy.split(1, pause=0.02, direction="to_client")
    began = time.monotonic()
    broker.sendall(b"hello")
    assert read(client, 5) == b"hello"
    assert sizes == [1] * 5
    assert time.monotonic() - began >= 0.07


def test_the_seed_determines_the_positions_at_which_the_proxy_splits_the_stream(listener, sizes: list[int]):
    def pieces(seed: int) -> list[int]:
        sizes.clear()
        with FaultProxy(f"127.0.0.1:{listener.getsockname()[1]}", seed=seed) as proxy:
            proxy.split(1, 50)
            with socket.create_connection(("127.0.0.1", proxy.port)) as client, listener.accept()[0] as broker:
                client.sendall(bytes(1000))
                broker.recv(1000, socket.MSG_WAITALL)
        return sizes.copy()

    first = pieces(7)
    assert sum(first) == 1000
    assert max(first) <= 50
    assert first == pieces(7)
    assert first != pieces(8)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_bytes_that_the_proxy_splits_and_merges_arrive_unchanged(dial, proxy, size):
    client, broker = dial()
    data = b"".join(frame(bytes(number)) for number in range(40))
    proxy.split(size, size + 3, direction="to_broker")
    proxy.merge(size * 5, wait=0.01, direction="to_client")
    client.sendall(data)
    assert read(broker, len(data)) == data
    for at in range(0, len(data), 11):
        broker.sendall(data[at : at + 11])
    assert read(client, len(data)) == data


def test_the_proxy_writes_merged_bytes_in_chunks_of_one_size_or_after_a_timeout(dial, proxy):
    client, broker = dial()
    proxy.merge(10, wait=PATIENCE)
    for number in range(9):
        client.sendall(b"%d" % number)
    assert has_nothing(broker)
    began = time.monotonic()
    client.sendall(b"9!")
    assert broker.recv(100) == b"0123456789"
    assert has_nothing(broker)
    proxy.merge(10, wait=1.0)
    assert broker.recv(100) == b"!"
    assert time.monotonic() - began >= 1.0


@pytest.mark.parametrize("known", [0, 1, 6, 7, 8, 100, 107])
def test_the_proxy_injects_a_frame_at_the_next_frame_boundary(dial, proxy, known):
    client, broker = dial()
    one, two = frame(bytes(100)), frame(b"two")
    broker.sendall(one + one[:known])
    proxy.wait_until(lambda proxy: proxy.connections[0].bytes_to_client == len(one) + known)
    proxy.inject(pamqp.commands.Channel.Flow(False), 1)
    broker.sendall(one[known:] + two)
    assert read(client, 2 * len(one) + len(FLOW) + len(two)) == one + (
        FLOW + one + two if known == 0 else one + FLOW + two
    )


def test_the_proxy_can_inject_a_frame_after_the_protocol_header_and_in_the_name_of_the_client(dial, proxy):
    client, broker = dial()
    client.sendall(b"AMQP\0\0")
    proxy.wait_until(lambda proxy: proxy.connections[0].bytes_to_broker == 6)
    proxy.inject(b"injected", direction="to_broker")
    client.sendall(b"\x09\x01" + frame(b"first"))
    assert read(broker, 8 + 8 + 13) == b"AMQP\0\0\x09\x01" + b"injected" + frame(b"first")


def test_the_proxy_injects_no_frame_into_a_stream_without_frames(dial, proxy):
    client, broker = dial()
    client.sendall(b"\x16\x03\x01\0\0\0\0\0")
    read(broker, 8)
    with pytest.raises(ValueError, match="connection 1 has no AMQP frames to_broker; is it encrypted with TLS"):
        proxy.inject(FLOW, direction="to_broker")
    proxy.inject(FLOW)
    assert read(client, len(FLOW)) == FLOW


@pytest.mark.parametrize("piece", [1, 3, 9, 10, 12, 1000])
def test_the_proxy_removes_the_answer_to_an_injected_frame_only_once(dial, proxy, piece):
    client, broker = dial()
    flow_ok = pamqp.frame.marshal(pamqp.commands.Channel.FlowOk(False), 1)
    elsewhere = pamqp.frame.marshal(pamqp.commands.Channel.FlowOk(False), 2)
    heartbeat = struct.pack(">BHI", 8, 0, 0) + b"\xce"
    client.sendall(frame(b"before"))
    read(broker, len(frame(b"before")))
    proxy.inject(pamqp.commands.Channel.Flow(False), 1, answer=pamqp.commands.Channel.FlowOk)
    assert read(client, len(FLOW)) == FLOW
    said = frame(b"begun") + heartbeat + elsewhere + flow_ok + heartbeat + frame(b"later") + flow_ok + frame(b"end")
    for at in range(0, len(said), piece):
        client.sendall(said[at : at + piece])
    heard = said.replace(flow_ok, b"", 1)
    assert read(broker, len(heard)) == heard
    assert has_nothing(broker)


@pytest.mark.parametrize("frames", [1, 2, 3])
def test_the_proxy_ends_connections_after_a_set_number_of_frames(dial, proxy, frames):
    client, broker = dial()
    proxy.cut_after(frames=frames)
    broker.sendall(b"".join(frame(b"%d" % number) for number in range(5)))
    assert to_the_end(client) == b"".join(frame(b"%d" % number) for number in range(frames))
    assert ends(broker) in ("end", "reset")


def test_the_proxy_ends_each_new_connection_after_a_set_number_of_frames(dial, proxy):
    proxy.cut_after(frames=1)
    for _ in range(3):
        client, broker = dial()
        broker.sendall(frame(b"one") + frame(b"two"))
        assert to_the_end(client) == frame(b"one")
    proxy.heal()
    client, broker = dial()
    broker.sendall(frame(b"one") + frame(b"two"))
    assert read(client, 22) == frame(b"one") + frame(b"two")


@pytest.mark.parametrize("size", range(1, 25))
def test_the_proxy_can_end_connections_after_any_byte(dial, proxy, size):
    client, broker = dial()
    proxy.cut_after(size=size, direction="to_broker")
    data = frame(b"first") + frame(b"second")
    client.sendall(data)
    assert to_the_end(broker) == data[:size]
    assert ends(client) in ("end", "reset")


def test_after_the_fault_refuse_new_connections_are_refused_until_heal_and_existing_connections_stay(dial, proxy):
    client, broker = dial()
    proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", proxy.port), timeout=PATIENCE)
    client.sendall(b"stays")
    assert read(broker, 5) == b"stays"
    proxy.heal()
    dial()[0].sendall(b"comes")
    assert proxy.accepted == 2


def test_a_proxy_without_a_free_file_descriptor_pauses_accepting(
    stack: ExitStack, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_module, "_PAUSE", 0.2)
    tries: list[float] = []

    class Exhausted(socket.socket):
        def accept(self) -> tuple[socket.socket, object]:
            tries.append(time.monotonic())
            if tries[-1] < tries[0] + 0.1:
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    with monkeypatch.context() as patched:
        patched.setattr(socket, "socket", Exhausted)
        proxy = stack.enter_context(FaultProxy(f"127.0.0.1:{listener.getsockname()[1]}"))
    stack.enter_context(socket.create_connection(("127.0.0.1", proxy.port), timeout=PATIENCE))
    stack.enter_context(listener.accept()[0])
    assert len(tries) == 2


def test_the_faults_of_a_proxy_schedule_occur_in_order_and_on_time(dial, proxy):
    dial()
    seen = []
    looked = threading.Event()
    began = time.monotonic()

    def note(_: FaultProxy) -> None:
        seen.append(time.monotonic() - began)
        looked.wait(PATIENCE)

    schedule = proxy.schedule([(0.05, note), (0.1, note), (0.15, FaultProxy.cut)])
    assert not schedule.done
    looked.set()
    schedule.wait(PATIENCE)
    proxy.wait_until(lambda proxy: not proxy.connections)
    assert len(seen) == 2
    assert seen[0] >= 0.05
    assert seen[1] >= 0.1


def test_a_proxy_schedule_may_be_endless_and_can_be_cancelled(proxy):
    taken = threading.Semaphore(0)

    def steps():
        at = 0.0
        while True:
            yield at, lambda _: taken.release()
            at += 0.001

    schedule = proxy.schedule(steps())
    for _ in range(10):
        assert taken.acquire(timeout=PATIENCE)
    schedule.cancel()
    schedule.wait(PATIENCE)
    assert schedule.done


def test_an_error_in_a_proxy_schedule_ends_the_schedule_and_is_reported(proxy, caplog):
    schedule = proxy.schedule([(0.0, lambda proxy: proxy.cut(connection=5)), (0.0, FaultProxy.refuse)])
    with pytest.raises(LookupError, match="there is no connection 5; the proxy has: none"):
        schedule.wait(PATIENCE)
    assert "a step of a schedule failed" in caplog.text
    socket.create_connection(("127.0.0.1", proxy.port), timeout=PATIENCE).close()


def test_an_error_in_a_step_that_has_cancelled_its_own_proxy_schedule_is_only_logged(proxy, caplog):
    def fail(_: FaultProxy) -> None:
        schedule.cancel()
        raise LookupError("too late")

    started = threading.Event()
    schedule = proxy.schedule([(0.0, lambda _: started.wait(PATIENCE)), (0.0, fail)])
    started.set()
    schedule.wait(PATIENCE)
    # A later schedule runs after the whole step.
    proxy.schedule([(0.0, lambda _: None)]).wait(PATIENCE)
    assert "a step of a schedule failed" in caplog.text
    assert "Exception in callback" not in caplog.text


def test_a_proxy_schedule_with_invalid_entries_raises_an_error(proxy):
    def steps():
        yield 0.0, lambda _: None
        raise LookupError("no more steps")

    with pytest.raises(LookupError, match="no more steps"):
        proxy.schedule(steps()).wait(PATIENCE)


def test_leaving_the_with_block_of_the_proxy_ends_all_its_connections(listener):
    with FaultProxy(f"127.0.0.1:{listener.getsockname()[1]}") as proxy:
        proxy.stall()
        client = socket.create_connection(("127.0.0.1", proxy.port), timeout=PATIENCE)
        broker, _ = listener.accept()
        broker.settimeout(PATIENCE)
        client.sendall(bytes(1000))
        schedule = proxy.schedule([(1000.0, FaultProxy.cut)])
    assert ends(client) in ("end", "reset")
    assert ends(broker) in ("end", "reset")
    assert schedule.done
    client.close()
    broker.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", proxy.port), timeout=PATIENCE)
    with pytest.raises(RuntimeError, match="the proxy is not running"):
        proxy.cut()
    with pytest.raises(RuntimeError, match="has run already"):
        proxy.__enter__()
    assert not [thread for thread in threading.enumerate() if thread.name == "qflow-proxy"]


def test_starting_the_proxy_on_a_port_in_use_raises_an_error(listener):
    taken = listener.getsockname()[1]
    with pytest.raises(OSError) as caught, FaultProxy("127.0.0.1:1", port=taken):
        pass
    assert caught.value.errno == errno.EADDRINUSE


@pytest.mark.parametrize(
    ("broker", "target", "url"),
    [
        ("127.0.0.1:1234", ("127.0.0.1", 1234), "amqp://127.0.0.1:{port}"),
        ("amqp://a:b@example.org/vh?heartbeat=5", ("example.org", 5672), "amqp://a:b@127.0.0.1:{port}/vh?heartbeat=5"),
        ("amqps://[::1]/%2F", ("::1", 5671), "amqps://127.0.0.1:{port}/%2F"),
    ],
)
def test_the_url_is_that_of_the_broker_with_the_address_of_the_proxy(broker, target, url):
    proxy = FaultProxy(broker)
    assert proxy.target == target
    with pytest.raises(RuntimeError, match="the proxy is not running"):
        _ = proxy.url
    with proxy:
        assert proxy.url == url.format(port=proxy.port)


@pytest.mark.parametrize("broker", ["", "localhost", "http://example.org"])
def test_creating_the_proxy_with_an_argument_that_is_not_a_broker_raises_an_error(broker):
    with pytest.raises(ValueError, match=r"AMQP URL or host:port"):
        FaultProxy(broker)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda proxy: proxy.stall("up"), "direction must be one of 'to_broker', 'to_client', not 'up'"),
        (lambda proxy: proxy.delay(-1), "seconds must be at least 0, not -1"),
        (lambda proxy: proxy.delay(float("nan")), "seconds must be at least 0, not nan"),
        (lambda proxy: proxy.limit(0), "bytes_per_second must be more than 0"),
        (lambda proxy: proxy.split(0), "lowest must be at least 1, not 0"),
        (lambda proxy: proxy.split(5, 4), "highest must be at least 5, not 4"),
        (lambda proxy: proxy.merge(0), "size must be at least 1"),
        (lambda proxy: proxy.cut_after(frames=-1), "frames must be at least 0"),
    ],
)
def test_the_proxy_refuses_faults_with_invalid_arguments(proxy, call, words):
    with pytest.raises(ValueError, match=words):
        call(proxy)


def test_a_wait_of_the_proxy_that_times_out_reports_the_connections(dial, proxy):
    dial()
    with pytest.raises(
        TimeoutError, match=r"the condition was not true within 0 s; the proxy has \(ProxiedConnection\(number=1"
    ):
        proxy.wait_until(lambda proxy: False, timeout=0)
