from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired
from types import SimpleNamespace

import pika
import pika.exceptions
import pytest
from pika.adapters.blocking_connection import BlockingChannel

from qflow_client.testing import rabbitmq as rabbitmq_module
from qflow_client.testing.rabbitmq import RabbitMQError, RabbitMQNode, RabbitMQNotInstalled

PERSISTENT = pika.BasicProperties(delivery_mode=2)


@contextmanager
def connected(node: RabbitMQNode) -> Iterator[pika.BlockingConnection]:
    connection = pika.BlockingConnection(pika.URLParameters(node.url))
    try:
        yield connection
    finally:
        if connection.is_open:
            connection.close()


def confirming_channel(connection: pika.BlockingConnection) -> BlockingChannel:
    channel = connection.channel()
    channel.confirm_delivery()
    return channel


def pump(connection: pika.BlockingConnection, until: Callable[[], object], timeout: float = 100.0) -> None:
    """Let the connection read until the condition is true."""
    deadline = time.monotonic() + timeout
    while not until():
        assert time.monotonic() < deadline, f"not within {timeout:g} s"
        connection.process_data_events(time_limit=0.05)


@pytest.fixture
def open_folder(rabbitmq: RabbitMQNode) -> Iterator[Path]:
    """A temporary folder that a node's account can enter. It cannot enter pytest's folders if root runs the tests."""
    with tempfile.TemporaryDirectory(prefix="qflow-tests-", dir=rabbitmq.directory.parent) as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.rabbitmq
def test_a_RabbitMQ_node_accepts_a_message_and_delivers_it(rabbitmq: RabbitMQNode) -> None:
    assert rabbitmq.running
    with connected(rabbitmq) as connection:
        channel = confirming_channel(connection)
        queue = channel.queue_declare("", exclusive=True).method.queue
        channel.basic_publish("", queue, b"here and back")
        _, _, body = channel.basic_get(queue, auto_ack=True)
    assert body == b"here and back"


@pytest.mark.rabbitmq
def test_ctl_returns_the_output_of_the_rabbitmqctl_command(rabbitmq: RabbitMQNode) -> None:
    assert rabbitmq.ctl("eval", "1 + 1.") == "2"


@pytest.mark.rabbitmq
def test_the_error_of_a_failed_ctl_contains_the_command_and_its_error_output(rabbitmq: RabbitMQNode) -> None:
    with pytest.raises(RabbitMQError, match=r"rabbitmqctl delete_queue nosuch failed with exit code \d+:\s+\S"):
        rabbitmq.ctl("delete_queue", "nosuch")


@pytest.mark.rabbitmq
def test_evaluate_returns_the_value_of_an_Erlang_expression_or_raises_its_error(
    rabbitmq: RabbitMQNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RabbitMQError, match=r"rabbitmqctl eval lists:nosuch\(\)\. failed with exit code \d+:\s+\S"):
        rabbitmq.evaluate("lists:nosuch().")
    # Without erl_call the answer is the same.
    for erl_call in (rabbitmq._tools.erl_call, None):
        monkeypatch.setattr(rabbitmq, "_tools", replace(rabbitmq._tools, erl_call=erl_call))
        assert rabbitmq.evaluate("X = 1, {X + 1,\ntwo}.").replace(" ", "") == "{2,two}"


@pytest.mark.rabbitmq
def test_evaluate_has_one_deadline_for_erl_call_and_rabbitmqctl_together(
    rabbitmq: RabbitMQNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    given = []

    def run(_: object, __: str, timeout: float) -> CompletedProcess[str]:
        nonlocal now
        given.append(timeout)
        now += 7.0
        if len(given) == 2:
            raise TimeoutExpired("rabbitmqctl", timeout)
        return CompletedProcess("erl_call", 1, "", "")

    monkeypatch.setattr(rabbitmq_module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(rabbitmq, "_tools", replace(rabbitmq._tools, erl_call="erl_call"))
    monkeypatch.setattr(rabbitmq, "_run", run)
    with pytest.raises(RabbitMQError, match=r"rabbitmqctl eval ok\. did not end within 3 s"):
        rabbitmq.evaluate("ok.", timeout=10.0)
    assert given == [10.0, 3.0]


@pytest.mark.rabbitmq
def test_starting_a_running_node_does_nothing(rabbitmq: RabbitMQNode) -> None:
    pid = rabbitmq.pid
    rabbitmq.start()
    assert rabbitmq.pid == pid


@pytest.mark.rabbitmq
def test_a_memory_alarm_blocks_publishers_and_the_end_of_the_alarm_unblocks_them(rabbitmq: RabbitMQNode) -> None:
    seen: list[str] = []
    with connected(rabbitmq) as connection:
        connection.add_on_connection_blocked_callback(lambda _connection, frame: seen.append(frame.method.reason))
        connection.add_on_connection_unblocked_callback(lambda _connection, _frame: seen.append("unblocked"))
        channel = connection.channel()
        queue = channel.queue_declare("", exclusive=True).method.queue
        rabbitmq.raise_memory_alarm()
        try:
            # RabbitMQ blocks a connection after the connection publishes. This message is then in flight.
            channel.basic_publish("", queue, b"held back")
            pump(connection, until=lambda: len(seen) == 1)
            assert seen == ["low on memory"]
        finally:
            rabbitmq.clear_memory_alarm()
        pump(connection, until=lambda: len(seen) == 2)
        assert seen[1] == "unblocked"
        pump(connection, until=lambda: channel.basic_get(queue, auto_ack=True)[2] == b"held back")


@pytest.mark.rabbitmq
def test_a_paused_node_accepts_connections_and_answers_only_after_it_is_resumed(rabbitmq: RabbitMQNode) -> None:
    rabbitmq.pause()
    try:
        with socket.create_connection(("127.0.0.1", rabbitmq.port), timeout=5.0) as connection:
            connection.sendall(b"AMQP\x00\x00\x09\x01")
            connection.settimeout(0.3)
            with pytest.raises(TimeoutError):
                connection.recv(1)
            assert rabbitmq.running
            rabbitmq.resume()
            connection.settimeout(100.0)
            assert connection.recv(1) == b"\x01"
    finally:
        rabbitmq.resume()


@pytest.mark.rabbitmq
def test_a_durable_queue_and_a_persistent_message_survive_a_kill_of_the_node(own_rabbitmq: RabbitMQNode) -> None:
    with connected(own_rabbitmq) as connection:
        channel = confirming_channel(connection)
        channel.queue_declare("survivor", durable=True)
        channel.basic_publish("", "survivor", b"still here", PERSISTENT)
        own_rabbitmq.sync()
        own_rabbitmq.kill()
        assert not own_rabbitmq.running
        with pytest.raises(pika.exceptions.AMQPConnectionError):
            pump(connection, until=lambda: False)
    url = own_rabbitmq.url
    own_rabbitmq.start()
    assert own_rabbitmq.url == url
    with connected(own_rabbitmq) as connection:
        _, _, body = connection.channel().basic_get("survivor", auto_ack=True)
    assert body == b"still here"


@pytest.mark.rabbitmq
def test_nodes_on_one_machine_share_no_alarms_and_the_end_of_a_node_removes_only_its_folder(
    rabbitmq: RabbitMQNode,
) -> None:
    with RabbitMQNode() as node:
        node.raise_memory_alarm()
        assert "memory" in node.evaluate("rabbit_alarm:get_alarms().")
        assert rabbitmq.evaluate("rabbit_alarm:get_alarms().") == "[]"
        assert node.directory.exists()
    assert not node.directory.exists()
    assert rabbitmq.evaluate("ok.") == "ok"


@pytest.mark.rabbitmq
def test_the_error_of_a_node_that_cannot_start_contains_the_text_of_its_log(rabbitmq: RabbitMQNode) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        node = RabbitMQNode()
        # A node first listens on this port.
        node._distribution_port = port = taken.getsockname()[1]
        try:
            with pytest.raises(RabbitMQError, match=rf"(?s)as it started:.*dist_port_already_used,{port}"):
                node.start()
            assert not node.running
        finally:
            node.close()


@pytest.mark.rabbitmq
def test_a_second_node_in_the_same_folder_has_the_data_even_if_the_first_node_was_paused(open_folder: Path) -> None:
    with RabbitMQNode(open_folder / "node") as first:
        with connected(first) as connection:
            connection.channel().queue_declare("kept", durable=True)
        first.pause()
        first.stop()
        assert not first.running
        with pytest.raises(RabbitMQError, match="is not running"):
            first.pause()
    with RabbitMQNode(open_folder / "node") as second, connected(second) as connection:
        connection.channel().queue_declare("kept", passive=True)


@pytest.mark.rabbitmq
@pytest.mark.skipif(os.geteuid() != 0, reason="only root hands a folder over to another user")
def test_a_node_does_not_start_in_a_folder_that_the_user_rabbitmq_cannot_enter(
    rabbitmq: RabbitMQNode, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    node = RabbitMQNode(tmp_path / "node")
    with pytest.raises(RabbitMQError, match="cannot be entered by user rabbitmq"):
        node.start()
    node.close()
    assert (tmp_path / "node").exists()


def test_without_rabbitmq_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(rabbitmq_module, "_EXTRA_FOLDERS", ())
    with pytest.raises(RabbitMQNotInstalled, match="apt-get install rabbitmq-server"):
        RabbitMQNode()
