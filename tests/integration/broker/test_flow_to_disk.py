"""A broker that has more messages than fit into its memory limit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pika
import pytest

from qflow_client import Message, Producer
from qflow_client.broker import Broker, Policy, PolicyDefinition, QueuePolicy
from tests.effort import EFFORT

#: Size of all messages in MiB.
MESSAGES = 1024 if EFFORT == "nightly" else 48
#: Memory limit of the broker, and maximum memory of its process, in MiB.
LIMIT, RESIDENT = (64, 256) if MESSAGES >= 1024 else (4, 80)
SIZE = 65536
ROOT = Path(__file__).parents[3]
SPOOL = Policy("spool", PolicyDefinition(policy=QueuePolicy.FLOW_TO_DISK))
# Prints its URL. After a line on standard input, prints the maximum memory that was used.
BROKER = """
import resource, sys
from pathlib import Path
from qflow_client.broker import Broker, Policy, PolicyDefinition, QueuePolicy

spool = Policy("spool", PolicyDefinition(policy=QueuePolicy.FLOW_TO_DISK))
with Broker(store=sys.argv[1], memory_limit=int(sys.argv[2]) << 20, policies=[spool]) as broker:
    print(broker.url, flush=True)
    sys.stdin.readline()
    status = Path("/proc/self/status")
    if status.exists():
        (peak,) = (int(line.split()[1]) << 10 for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(peak, broker.memory.peak, broker.memory.evicted, flush=True)
"""


@pytest.mark.program
@pytest.mark.timeout(300)
def test_A2_messages_that_do_not_fit_into_memory_flow_to_disk_and_arrive_in_order(tmp_path):
    count = (MESSAGES << 20) // SIZE
    with subprocess.Popen(
        [sys.executable, "-c", BROKER, str(tmp_path / "store"), str(LIMIT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        parameters = pika.URLParameters(process.stdout.readline().strip())
        url = f"amqp://guest:guest@127.0.0.1:{parameters.port}/%2F"
        with pika.BlockingConnection(parameters) as connection:
            channel = connection.channel()
            channel.queue_declare("q")
            with Producer(url, routing_key="q") as producer:
                for number in range(count):
                    producer.send(Message(number.to_bytes(8, "big") + bytes(SIZE - 8), delivery_mode=1))
                producer.flush(120)
            assert channel.queue_declare("q", passive=True).method.message_count == count
            channel.basic_qos(prefetch_count=50)
            numbers = iter(range(count))
            for method, _, body in channel.consume("q", inactivity_timeout=60):
                assert method is not None, "no more came"
                assert body is not None
                assert len(body) == SIZE
                number = next(numbers)
                assert int.from_bytes(body[:8], "big") == number
                channel.basic_ack(method.delivery_tag or 0)
                if number == count - 1:
                    break
        process.stdin.write("\n")
        process.stdin.flush()
        resident, peak, evicted = map(int, process.stdout.readline().split())
    assert evicted > count // 2
    assert peak <= LIMIT << 20
    assert resident <= RESIDENT << 20, f"{resident >> 20} MiB"


def test_A2_browse_and_get_return_messages_that_were_moved_to_disk(tmp_path):
    with Broker(store=tmp_path / "store", memory_limit=1 << 20, policies=[SPOOL]) as broker:
        broker.declare_queue("q", durable=True)
        for number in range(40):
            broker.publish(b"%d" % number * 50_000, "q")
        # Flow control does not hold messages from `Broker.publish`, so the broker needs a moment to write them to disk.
        broker.wait_until(lambda broker: broker.memory.evicted > 20 and broker.memory.bytes < 1 << 20)
        assert [message.body for message in broker.messages("q")] == [b"%d" % number * 50_000 for number in range(40)]
        assert broker.queue("q").memory < 1 << 20
        assert broker.memory.bytes < 1 << 20
        for number in range(40):
            message = broker.get("q")
            assert message is not None
            assert message.body == b"%d" % number * 50_000
        assert broker.memory.bytes == 0


def test_A2_a_broker_opens_a_store_that_is_larger_than_its_memory_limit(tmp_path):
    with Broker(store=tmp_path / "store") as broker:
        broker.declare_queue("q", durable=True)
        with Producer(broker.url, routing_key="q") as producer:
            for number in range(100):
                producer.send(b"%d " % number + bytes(100_000))
    with Broker(store=tmp_path / "store", memory_limit=2 << 20, policies=[SPOOL]) as broker:
        assert broker.memory.bytes < 2 << 20
        assert broker.queue("q").depth == 100
        for number in range(100):
            message = broker.get("q")
            assert message is not None
            assert message.body.startswith(b"%d " % number)


def test_D8_above_the_memory_limit_connections_are_blocked_until_there_is_room():
    with Broker(memory_limit=1 << 20) as broker:
        broker.declare_queue("q")
        with Producer(broker.url, routing_key="q", capacity=20) as producer:
            for _ in range(11):
                producer.send(bytes(100_000)).result(20)
            broker.wait_until(lambda broker: "memory" in broker.alarms)
            assert "of at most 1048576" in broker.alarms["memory"]
            broker.wait_until(lambda broker: any(each.blocked for each in broker.connections()))
            broker.purge("q")
            broker.wait_until(lambda broker: not broker.alarms)
            producer.send(b"x").result(20)


def test_an_alarm_raised_by_an_operator_is_cleared_only_by_an_operator():
    with Broker(memory_limit=1 << 20) as broker:
        broker.declare_queue("q")
        broker.raise_alarm("memory", "because")
        broker.publish(b"x", "q")
        broker.get("q")
        assert broker.alarms == {"memory": "because"}


def test_A5_a_message_removed_from_a_durable_queue_is_still_complete_in_a_transient_queue(tmp_path):
    persistent = pika.BasicProperties(delivery_mode=2)
    with Broker(store=tmp_path / "store") as broker:
        with pika.BlockingConnection(pika.URLParameters(broker.url)) as connection:
            channel = connection.channel()
            channel.exchange_declare("fan", "fanout")
            channel.queue_declare("durable", durable=True)
            spool = {"x-qflow-policy": "flow_to_disk", "qpid.max_size": 1000}
            channel.queue_declare("transient", arguments=spool)
            for queue in ("durable", "transient"):
                channel.queue_bind(queue, "fan")
            channel.confirm_delivery()
            channel.basic_publish("fan", "", b"1" * 600, persistent)
            channel.basic_get("transient")
            method, _, _ = channel.basic_get("durable")
            assert method is not None
            assert method.delivery_tag is not None
            channel.basic_ack(method.delivery_tag)
            broker.wait_until(lambda broker: not broker.queue("durable").depth and not broker.memory.backlog)
            # This exceeds the maximum in memory, so the unacknowledged message goes to disk first.
            channel.basic_publish("", "transient", b"2" * 600, persistent)
            broker.wait_until(lambda broker: broker.memory.evicted)
        with pika.BlockingConnection(pika.URLParameters(broker.url)) as connection:
            channel = connection.channel()
            assert [channel.basic_get("transient", auto_ack=True)[2] for _ in range(2)] == [b"1" * 600, b"2" * 600]
            channel.queue_declare("the store still works", durable=True)
