"""Programs that tests run in separate processes, because a signal or a fork affects a whole process."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from qflow_client import (
    FlowControlTimeout,
    HoldKind,
    MessageReturned,
    Outcome,
    OutcomeUnknown,
    Producer,
    ProducerClosed,
    QflowError,
    Receipt,
    UndeliveredMessages,
)
from qflow_client import engine as base_engine_module
from qflow_client import skin as skin_module
from qflow_client.broker import Broker
from qflow_client.logs import flush_logs
from qflow_client.outbox import noted as noted_module
from qflow_client.outbox import writer as writer_module
from qflow_client.sync import SyncReceipt
from qflow_client.sync import engine as engine_module
from qflow_client.sync import receipt as receipt_module


def _say(word: str) -> None:
    print(word, flush=True)


def _say_when(condition: Callable[[], Any]) -> None:
    """Print ``waiting`` when a condition is true and the main thread sleeps. The system reports whether it sleeps."""
    status = Path(f"/proc/self/task/{threading.main_thread().native_id}/stat")

    def sleeps() -> bool:
        return not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "S"

    def wait() -> None:
        while not (condition() and sleeps()):
            time.sleep(0.002)
        _say("waiting")

    threading.Thread(target=wait, daemon=True).start()


def _join_ours() -> None:
    for thread in threading.enumerate():
        # The logging thread serves all producers of the process, so it does not end.
        if thread.name.startswith("qflow-") and thread.name != "qflow-log":
            thread.join(20)
            assert not thread.is_alive(), thread


def interrupted(*calls: str) -> None:
    """Press Ctrl-C in each of these blocking calls, and check the remaining threads and messages."""
    for call in calls:
        {"connect": _interrupted_connecting, "good_bye": _interrupted_good_bye}.get(call, partial(_interrupted, call))()
    _join_ours()
    _say("fine")


def _interrupted(call: str) -> None:
    broker = Broker().__enter__()
    broker.declare_queue("q")
    producer = Producer(broker.url, routing_key="q", capacity=1)
    protocol = producer._protocol
    broker.withhold_confirms()
    receipt = producer.send(b"written")
    broker.wait_until(lambda b: b.queue("q").depth == 1)
    if call == "wait_unflowed":
        producer.pause()
    # These internal numbers show that the call waits.
    _say_when(
        {
            "send": lambda: protocol.controller.waiting,
            "flush": lambda: protocol.waiters.settled,
            "result": lambda: receipt._waiter is not None,
            "wait_unflowed": lambda: protocol.waiters.unflowed,
            "flow_events": lambda: len(producer._engine.listeners.iterators),
            "close": lambda: protocol.waiters.settled,
            "leaving": lambda: protocol.waiters.settled,
        }[call]
    )
    logging.getLogger("qflow_client").setLevel(logging.CRITICAL)

    interrupt: Any = None

    def leave() -> None:
        with producer:
            raise LookupError

    try:
        {
            "send": lambda: producer.send(b"interrupted", timeout=None),
            "flush": lambda: producer.flush(timeout=None),
            "result": lambda: receipt.result(timeout=None),
            "wait_unflowed": lambda: producer.wait_unflowed(timeout=None),
            "flow_events": lambda: next(producer.flow_events()),
            "close": lambda: producer.close(timeout=None),
            "leaving": leave,
        }[call]()
    except KeyboardInterrupt as error:
        interrupt = error
        _say("interrupted")
    if call in ("close", "leaving"):
        assert interrupt.undelivered.receipts == (receipt,)
        assert isinstance(interrupt.__context__, LookupError if call == "leaving" else type(None))
    assert protocol.controller.waiting == 0
    assert not protocol.waiters.settled
    assert not protocol.waiters.unflowed
    broker.release_confirms()
    if call in ("close", "leaving"):
        assert producer.closed
        assert receipt.done
    else:
        producer.resume()
        receipt.result(timeout=20)
        producer.send(b"after", timeout=20).result(timeout=20)
        producer.close()
        assert [message.body for message in broker.messages("q")] == [b"written", b"after"]
    broker.__exit__(None, None, None)


def _interrupted_good_bye() -> None:
    """Press Ctrl-C while the producer closes and the broker does not answer."""
    with Broker() as broker:
        broker.declare_queue("q")
        producer = Producer(broker.url, routing_key="q")
        # Without Ctrl-C, the close would wait for longer than the test.
        skin_module.GOOD_BYE = 60.0
        # The replaced function does not close the connection, so no answer comes.
        leaves = threading.Event()
        link: Any = producer._engine.link
        link._leave = leaves.set
        _say_when(leaves.is_set)
        try:
            producer.close(timeout=None)
        except KeyboardInterrupt:
            _say("interrupted")
        # The producer is closed permanently.
        producer.close(timeout=None)


def _interrupted_connecting() -> None:
    """Press Ctrl-C while the producer connects and the server does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def wait() -> None:
            client, _ = listener.accept()
            client.recv(8)
            _say("waiting")
            client.recv(8)
            client.close()

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        try:
            Producer(f"amqp://guest:guest@127.0.0.1:{listener.getsockname()[1]}/%2F", connect_timeout=60)
        except KeyboardInterrupt:
            _say("interrupted")
        # The producer has closed the connection.
        thread.join(20)
        assert not thread.is_alive()


def forked() -> None:
    """Fork while the producer is in use."""
    broker = Broker().__enter__()
    broker.declare_queue("q")
    producer = Producer(broker.url, routing_key="q")
    enough = threading.Event()
    sent = []

    def work() -> None:
        while not enough.is_set():
            sent.append(producer.send(b"parent"))

    workers = [threading.Thread(target=work, daemon=True) for _ in range(2)]
    for worker in workers:
        worker.start()
    for turn in range(5):
        broker.wait_until(lambda b, turn=turn: b.queue("q").published > 200 * turn)  # type: ignore[misc]
        pid = os.fork()
        if pid == 0:
            os._exit(_child(producer))
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0, status
    enough.set()
    for worker in workers:
        worker.join()
    producer.flush(timeout=20)
    assert len(broker.connections()) == 1
    bodies = [message.body for message in broker.messages("q")]
    assert bodies == [b"parent"] * len(sent)
    producer.close()
    broker.__exit__(None, None, None)
    _say("fine")


def _child(producer: Producer) -> int:
    # The child must not wake the parent's I/O thread. This needs a lock that a thread of the parent may have held.
    producer._services.wake = lambda: os._exit(6)  # type: ignore[method-assign]
    began = time.monotonic()
    for call in (
        lambda: producer.send(b"child"),
        lambda: producer.send_nowait(b"child"),
        lambda: producer.wait_unflowed(),
        lambda: producer.flush(),
    ):
        try:
            call()
        except ProducerClosed as error:
            if "child" not in str(error) or str(os.getpid()) not in str(error):
                return 2
        else:
            return 3
    try:
        producer.close()
    except UndeliveredMessages:
        return 4
    # The calls wait for nothing. The limit of ten seconds allows for a slow machine.
    return 0 if producer.closed and time.monotonic() - began < 10 else 5


def forked_while_disconnected(url: str, count: str) -> None:
    """Fork `count` times between two attempts to connect, or during an attempt. The proxy of the test decides."""
    logging.disable()
    producer = Producer(url, routing_key="q", reconnect_delay=0.05, reconnect_delay_max=0.1)
    receipt = producer.send(b"unsettled")
    _say("sent")
    # Poll, because the hold may have been raised before this line.
    while HoldKind.DISCONNECTED not in {hold.kind for hold in producer.flow_state.holds}:
        time.sleep(0.01)
    copies = 0
    for _ in range(int(count)):
        pid = os.fork()
        if pid == 0:
            if connected_to(url):
                os._exit(9)
            assert isinstance(receipt.error(), OutcomeUnknown)
            os._exit(_child(producer))
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        assert code in {0, 9}, code
        copies += code == 9
    # A child may have a copy of a socket that another thread was creating during the fork.
    assert copies <= 2, copies
    _say("forked")
    assert receipt.result(timeout=20) is Outcome.CONFIRMED
    producer.send(b"parent").result(timeout=20)
    producer.close()
    _say("fine")


def connected_to(url: str) -> list[int]:
    """Return the file descriptors of this process that are sockets connected to a broker."""
    found = []
    for each in tuple(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(each.name))) as sock:
            if sock.family == socket.AF_INET and sock.getpeername()[1] == urlsplit(url).port:
                found.append(int(each.name))
    return found


def forked_makes_its_own(url: str) -> None:
    """Fork a child that creates its own producer."""
    producer = Producer(url, routing_key="q")
    producer.send(b"parent 1").result(timeout=20)
    pid = os.fork()
    if pid == 0:
        with Producer(url, routing_key="q") as own:
            own.send(b"child").result(timeout=20)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, status
    producer.send(b"parent 2").result(timeout=20)
    producer.close()
    _say("fine")


def forked_in_the_middle() -> None:
    """Fork with written, unwritten and returned messages, while other threads hold all locks of the producer."""
    broker = Broker().__enter__()
    broker.declare_queue("q")
    told: list[Receipt] = []
    producer = Producer(broker.url, routing_key="q", name="callbacks", on_delivery=told.append)
    quiet = Producer(broker.url, routing_key="q")
    returned = quiet.send(b"", routing_key="nowhere")
    assert returned.wait(timeout=20)
    events = producer.flow_events()
    broker.withhold_confirms()
    receipts = [producer.send(b"%d" % number) for number in range(3)]
    broker.wait_until(lambda b: b.queue("q").depth == 3)
    # Messages that are sent from here on stay unwritten.
    go_on, stays, holds_all = threading.Event(), threading.Event(), threading.Event()

    def stay() -> None:
        stays.set()
        go_on.wait(20)

    def hold_all() -> None:
        with producer._engine.lock, quiet._engine.lock, receipt_module._making:
            holds_all.set()
            go_on.wait(20)

    producer._services.add_callback_threadsafe(stay)
    assert stays.wait(20)
    receipts += [producer.send(b"%d" % number) for number in range(3, 6)]
    threading.Thread(target=hold_all).start()
    assert holds_all.wait(20)
    tapped = producer._services.tapped
    assert tapped is not None
    inode = os.fstat(tapped.fileno()).st_ino
    pid = os.fork()
    if pid == 0:
        try:
            # The child has closed its copy of the parent's connection.
            assert inode not in _open_inodes()
            assert list(events) == []
            for receipt in receipts:
                # Unwritten messages are also unknown in the child, because the parent will write them.
                assert receipt.wait(timeout=0)
                assert isinstance(receipt.error(), OutcomeUnknown)
                _raises(OutcomeUnknown, receipt.result)
            _raises(MessageReturned, returned.result)
            assert not SyncReceipt(b"", receipts[0]._route, None).wait(timeout=0.01)
            for each in (producer, quiet):
                assert each.closed
                assert each.unsettled == each.in_flight == 0
                assert each.flow_state.flowed
                _raises(ProducerClosed, lambda each=each: each.send(b"child", timeout=None))  # type: ignore[misc]
                _raises(ProducerClosed, each.flush)
                each.capacity = 7
                each.pause()
                each.resume()
                each.on_flow(told.append)  # type: ignore[arg-type]  # it is not called
                assert list(each.flow_events()) == []
                with each:
                    pass
            assert told == []
            assert not [t.name for t in threading.enumerate() if t.name.startswith("qflow-")]
        except BaseException as error:
            _say(f"{type(error).__name__} in line {error.__traceback__ and error.__traceback__.tb_lineno}: {error}")
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, status
    go_on.set()
    broker.release_confirms()
    assert [receipt.result(timeout=20) for receipt in receipts] == [Outcome.CONFIRMED] * 6
    producer.close()
    assert told == receipts
    assert not quiet.closed
    _raises(UndeliveredMessages, quiet.close)
    assert [message.body for message in broker.messages("q")] == [b"%d" % number for number in range(6)]
    broker.__exit__(None, None, None)
    _say("fine")


def _open_inodes() -> list[int]:
    # The descriptor of the folder itself is closed after the listing.
    return [os.fstat(int(each.name)).st_ino for each in tuple(Path("/proc/self/fd").iterdir()) if each.exists()]


def _raises(kind: type[QflowError], call: Callable[[], object]) -> None:
    try:
        result = call()
    except kind:
        return
    raise AssertionError(f"{call} returned {result}")


def _wait_for_log_lines_at_exit() -> None:
    """Wait for the log lines of the library's exit handler, for longer than the library itself waits."""
    # Handlers run in reverse order of registration.
    atexit.unregister(base_engine_module._at_exit)
    atexit.register(flush_logs, 20)
    atexit.register(base_engine_module._at_exit)


def forgotten(url: str, count: str, patience: str = "") -> None:
    """A program that ends without closing its producer, while messages are unconfirmed. `patience` limits the exit."""
    if patience:
        engine_module._AT_EXIT = float(patience)
    _wait_for_log_lines_at_exit()
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    producer = Producer(url, routing_key="q", name="orders")
    # Keep the producer alive until the process ends.
    atexit.register(repr, producer)
    for _ in range(int(count)):
        producer.send(b"")
    _say("fine")


def closed_at_the_very_end(url: str) -> None:
    """A program with an exit handler that runs after the library's, and a finalizer that runs after all threads."""

    class Last:
        producer = Producer(url, routing_key="q")

        def __del__(self) -> None:
            lost = self.producer.send(b"lost")
            try:
                self.producer.close(timeout=600)
            except UndeliveredMessages as error:
                _say("reported" if error.receipts == (lost,) else repr(error))

    sys.modules["last"] = Last()  # type: ignore[assignment]  # kept until the very end
    producer = Producer(url, routing_key="q")

    def close() -> None:
        producer.send(b"late")
        producer.close(timeout=20)
        _say("closed" if producer._engine.link is not None and producer._engine.link.ended else "not closed")

    # Handlers run in reverse order of registration, and an import of the library registers the library's handler.
    atexit.unregister(base_engine_module._at_exit)
    atexit.register(close)
    atexit.register(base_engine_module._at_exit)


def sends_at_the_very_end(url: str, outbox: str) -> None:
    """A program that does not close its producer. The program's exit handler sends after the library's handler."""
    producer = Producer(url, routing_key="q", outbox=outbox)
    producer.send(b"early")

    def send() -> None:
        producer.send(b"late").result(timeout=20)
        _say("sent")

    atexit.unregister(base_engine_module._at_exit)
    atexit.register(send)
    atexit.register(base_engine_module._at_exit)


def ends_while_the_disk_hangs(url: str, outbox: str) -> None:
    """A program that does not close its producer. When the program ends, its disk no longer answers."""
    _wait_for_log_lines_at_exit()
    # The message is not deleted before the disk hangs, because the writer waits for more deletions.
    writer_module._GATHER = 60.0
    producer = Producer(url, routing_key="q", outbox=outbox)
    producer.send(b"early").result(timeout=20)

    def hang(*_: object, **__: object) -> int:
        threading.Event().wait()
        return 0

    noted_module.Noted.write = hang  # type: ignore[method-assign]
    _say("hangs")


def forgotten_while_threads_send(url: str) -> None:
    """A program that ends while its daemon threads use producers."""
    logging.disable()
    enough = threading.Semaphore(0)

    def work(producer: Producer) -> None:
        while True:
            producer.send(b"")
            enough.release()

    def wait(producer: Producer) -> None:
        producer.wait_unflowed()

    for number in range(2):
        producer = Producer(url, routing_key="q", on_delivery=lambda _receipt: None, name=str(number))
        producer.on_flow(lambda _event: None)
        for _ in range(3):
            threading.Thread(target=work, args=(producer,), daemon=True).start()
    paused = Producer(url, routing_key="q")
    paused.pause()
    threading.Thread(target=wait, args=(paused,), daemon=True).start()
    for _ in range(1000):
        enough.acquire()
    _say("fine")


def pressed_at_any_moment(url: str, count: str) -> None:
    """Press Ctrl-C many times in short calls. A signal, unlike a tracer, also interrupts Python's own functions."""

    def press(*_: object) -> None:
        raise KeyboardInterrupt

    producer = Producer(url, routing_key="q", capacity=4)
    done = threading.Event()
    others: list[SyncReceipt] = []

    def work() -> None:
        while not done.is_set():
            others.append(producer.send(b"other", timeout=20))

    other = threading.Thread(target=work, daemon=True)
    other.start()
    signal.signal(signal.SIGALRM, press)
    receipts: list[SyncReceipt] = []
    pressed = 0
    for number in itertools.count():
        # On a slow machine, the other thread may use the whole capacity for a long time.
        if number >= int(count) and receipts and pressed > int(count) // 30:
            break
        try:
            try:
                # Choose moments from the start of the call until after its end, even if the call takes long.
                slowness = 1 << number // 150 % 5
                signal.setitimer(signal.ITIMER_REAL, 1e-6 * slowness * (1 + number % 150))
                if number % 3:
                    receipts.append(producer.send(b"own", timeout=0.0005 * (number % 2)))
                else:
                    producer.pause()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except FlowControlTimeout:
            pass
        except KeyboardInterrupt:
            pressed += 1
        producer.resume()
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    producer.resume()
    done.set()
    other.join(20)
    assert not other.is_alive()
    producer.flush(timeout=20)
    assert all(receipt.outcome is Outcome.CONFIRMED for receipt in (*receipts, *others))
    protocol = producer._protocol
    assert producer.unsettled == protocol.window.used == protocol.controller.waiting == 0
    producer.close()
    _say(f"{len(receipts)} {len(others)}")


if __name__ == "__main__":
    # A shell lets background jobs ignore Ctrl-C, and their child processes inherit this.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    globals()[sys.argv[1]](*sys.argv[2:])
