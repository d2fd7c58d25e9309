"""Programs that tests run in processes of their own: what a signal or a fork does is done to a whole process."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from qflow_client import Producer, ProducerClosed, UndeliveredMessages
from qflow_client.broker import Broker


def _say(word: str) -> None:
    print(word, flush=True)


def _say_when(condition: Callable[[], Any]) -> None:
    def wait() -> None:
        while not condition():
            time.sleep(0.002)
        _say("waiting")

    threading.Thread(target=wait, daemon=True).start()


def interrupted(call: str) -> None:
    """Ctrl-C in one blocking call, and what is left then."""
    broker = Broker().__enter__()
    broker.declare_queue("q")
    producer = Producer(broker.url, routing_key="q", capacity=1)
    protocol = producer._protocol
    broker.withhold_confirms()
    receipt = producer.send(b"written")
    broker.wait_until(lambda b: b.queue("q").depth == 1)
    if call == "wait_unflowed":
        producer.pause()
    # Nobody else needs to know who waits for what.
    _say_when(
        {
            "send": lambda: protocol.controller.waiting,
            "flush": lambda: protocol._flushes,
            "result": lambda: receipt._waiter is not None,
            "wait_unflowed": lambda: protocol._unflow_waiters,
            "close": lambda: protocol._flushes,
        }[call]
    )
    try:
        {
            "send": lambda: producer.send(b"interrupted", timeout=None),
            "flush": lambda: producer.flush(timeout=None),
            "result": lambda: receipt.result(timeout=None),
            "wait_unflowed": lambda: producer.wait_unflowed(timeout=None),
            "close": lambda: producer.close(timeout=None),
        }[call]()
    except KeyboardInterrupt:
        _say("interrupted")
    assert protocol.controller.waiting == 0
    assert not protocol._flushes
    assert not protocol._unflow_waiters
    broker.release_confirms()
    if call == "close":
        assert producer.closed
        assert receipt.done
    else:
        producer.resume()
        receipt.result(timeout=10)
        producer.send(b"after", timeout=10).result(timeout=10)
        producer.close()
        assert [message.body for message in broker.messages("q")] == [b"written", b"after"]
    broker.__exit__(None, None, None)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("qflow-")]
    _say("fine")


def interrupted_connecting() -> None:
    """Ctrl-C while a server does not answer."""
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
        # It was cut.
        thread.join(10)
        assert not thread.is_alive()
    while [thread.name for thread in threading.enumerate() if thread.name.startswith("qflow-")]:
        time.sleep(0.002)
    _say("fine")


def forked() -> None:
    """A fork while the producer is in use."""
    broker = Broker().__enter__()
    broker.declare_queue("q")
    producer = Producer(broker.url, routing_key="q")
    enough = threading.Event()
    sent = []

    def work() -> None:
        while not enough.is_set():
            sent.append(producer.send(b"parent"))

    workers = [threading.Thread(target=work) for _ in range(2)]
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
    began = time.monotonic()
    for call in (
        lambda: producer.send(b"child"),
        lambda: producer.send_nowait(b"child"),
        lambda: producer.wait_unflowed(),
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
    return 0 if producer.closed and time.monotonic() - began < 1 else 5


def forked_makes_its_own(url: str) -> None:
    """A child that makes a producer for itself, next to its parent's."""
    producer = Producer(url, routing_key="q")
    producer.send(b"parent 1").result(timeout=10)
    pid = os.fork()
    if pid == 0:
        with Producer(url, routing_key="q") as own:
            own.send(b"child").result(timeout=10)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, status
    producer.send(b"parent 2").result(timeout=10)
    producer.close()
    _say("fine")


def forgotten(url: str) -> None:
    """A program that ends without closing its producer."""
    producer = Producer(url, routing_key="q")
    producer.send(b"").result(timeout=10)
    _say("fine")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
