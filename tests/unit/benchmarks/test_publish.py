"""The functions of `benchmarks.publish` without measurements. Measured values are not tested."""

from __future__ import annotations

import json
from dataclasses import replace
from struct import pack

import pytest
from pamqp import commands
from pamqp.body import ContentBody
from pamqp.frame import unmarshal
from pamqp.header import ContentHeader

from benchmarks import peers
from benchmarks.peers import Job, Timing
from benchmarks.peers.base import headers, one_by_one, timestamp
from benchmarks.peers.plain import AckWindow, publish_frames
from benchmarks.publish import parser
from benchmarks.report import Bar, document, missed, plain_table, summarize
from benchmarks.runner import Measurement, Plan, slow_count, within_bytes


def ack(tag: int, *, multiple: bool = False) -> bytes:
    return pack(">BHI4sQBB", 1, 1, 13, b"\0\x3c\0\x50", tag, multiple, 0xCE)


@pytest.mark.parametrize("size", [0, 1, 100, 5000])
def test_the_plain_socket_of_the_benchmark_sends_the_same_bytes_as_the_qflow_producer(size: int) -> None:
    data, length = publish_frames("a queue", b"x" * size, 3, 4096)
    assert len(data) == 3 * length
    frames = []
    rest = data
    while rest:
        taken, channel, decoded = unmarshal(rest)
        assert channel == 1
        frames.append(decoded)
        rest = rest[taken:]
    publishes = [each for each in frames if isinstance(each, commands.Basic.Publish)]
    headers = [each for each in frames if isinstance(each, ContentHeader)]
    bodies = [each.value for each in frames if isinstance(each, ContentBody)]
    assert [(each.routing_key, each.mandatory) for each in publishes] == [("a queue", True)] * 3
    assert [each.body_size for each in headers] == [size] * 3
    assert [each.properties.delivery_mode for each in headers] == [2] * 3
    assert len({each.properties.message_id for each in headers}) == 3
    assert {len(each.properties.message_id or "") for each in headers} == {29}
    assert b"".join(bodies) == b"x" * size * 3


def test_varied_benchmark_messages_have_different_headers_and_timestamps_and_the_same_length() -> None:
    data, length = publish_frames("q", b"body", 3, 4096, varying=True)
    assert len(data) == 3 * length
    seen = []
    while data:
        taken, _, decoded = unmarshal(data)
        data = data[taken:]
        if isinstance(decoded, ContentHeader):
            seen.append((decoded.properties.headers, decoded.properties.timestamp))
    assert [each for each, _ in seen] == [headers(number) for number in range(3)]
    assert [each and int(each.timestamp()) for _, each in seen] == [timestamp(number) for number in range(3)]


def test_the_publish_benchmark_sends_fewer_messages_if_the_bodies_are_large() -> None:
    assert within_bytes(0) > 1_000_000
    assert within_bytes(1 << 20) == 256
    assert within_bytes(1 << 40) == 1


def test_the_benchmark_that_confirms_one_by_one_measures_the_latency_of_a_sample_of_messages() -> None:
    published: list[int] = []
    job = Job("", "q", b"", 10, 1, True, sample=4)
    assert len(one_by_one(job, lambda: published.append(1))) == 3
    assert len(published) == 10
    assert one_by_one(replace(job, sample=0), lambda: None) == []


def test_benchmark_latencies_are_percentiles_over_all_rounds_and_fairness_is_a_median() -> None:
    measured = [
        Measurement("qflow", 100, at, 10, 1.0, 0.1, tuple((at * 50 + n) / 1000 for n in range(1, 51)), fair)
        for at, fair in enumerate((0.9, 0.5))
    ]
    (row,) = summarize(["qflow"], STUBS, measured)
    assert row.latency_p50 == pytest.approx(51)
    assert row.latency_p99 == pytest.approx(100)
    assert row.fairness == pytest.approx(0.7)
    (row,) = summarize(["qflow"], STUBS, [Measurement("qflow", 100, 0, 10, 1.0, 0.1)])
    assert (row.latency_p50, row.latency_p99, row.fairness) == (None, None, None)


def test_each_ack_counts_once_in_any_order_and_however_the_stream_is_split() -> None:
    data = ack(1) + ack(3) + ack(2, multiple=True) + ack(7) + b"\x08\0\0\0\0\0\0\xce" + ack(6) + ack(5, multiple=True)
    for cut in range(len(data) + 1):
        window = AckWindow()
        window.feed(data[:cut])
        window.feed(data[cut:])
        assert (window.confirmed, window.floor, window.above) == (7, 7, set())


def test_acks_are_counted_even_if_earlier_delivery_tags_are_still_unacked() -> None:
    window = AckWindow()
    window.feed(ack(2) + ack(4) + ack(5))
    assert (window.confirmed, window.floor) == (3, 0)
    window.feed(ack(4, multiple=True))
    assert (window.confirmed, window.floor) == (5, 5)


def test_the_plain_socket_of_the_benchmark_does_not_count_a_nack_as_an_ack() -> None:
    with pytest.raises(ConnectionError):
        AckWindow().feed(ack(1).replace(b"\0\x50", b"\0\x78"))


@pytest.mark.parametrize(
    ("messages", "rate", "count"), [(50_000, 100_000, 50_000), (50_000, 12_500, 50_000), (50_000, 100, 80), (9, 0.5, 1)]
)
def test_the_publish_benchmark_sends_fewer_messages_to_slow_peers(messages: int, rate: float, count: int) -> None:
    assert slow_count(messages, rate) == count


class Stub:
    title = "a stub"
    distribution = ""
    varies = False

    def run(self, job: Job) -> Timing:
        raise AssertionError(f"nobody runs {job}")


STUBS: dict[str, peers.Peer] = {name: Stub() for name in ("plain", "qflow", "pika_select", "aiopika")}

# The machine is half as fast in the second round, and then fast again.
MEASUREMENTS = [
    Measurement(peer, 100, at, 1000, 1000 / (rate * speed), 0.1)
    for at, speed in enumerate((1.0, 0.5, 1.1))
    for peer, rate in (("plain", 1000.0), ("qflow", 800.0), ("pika_select", 400.0), ("aiopika", 50.0))
]


def test_a_benchmark_ratio_compares_results_of_the_same_round() -> None:
    rows = {row.peer: row for row in summarize(["plain", "qflow", "amqpstorm"], STUBS, MEASUREMENTS)}
    assert rows["qflow"].rate == pytest.approx(800)
    assert rows["qflow"].slowest == pytest.approx(400)
    assert rows["qflow"].fastest == pytest.approx(880)
    assert rows["qflow"].to_plain == pytest.approx(0.8)
    assert rows["qflow"].to_pika_select == pytest.approx(2.0)
    assert rows["qflow"].to_aiopika == pytest.approx(16.0)
    assert rows["qflow"].cpu_per_100k == pytest.approx(10.0)
    assert not rows["amqpstorm"].installed


def test_a_required_ratio_is_missed_only_if_the_measured_ratio_is_lower_or_absent() -> None:
    rows = summarize(["plain", "qflow"], STUBS, MEASUREMENTS)
    assert missed([Bar("qflow", 100, "to_plain", 0.8), Bar("qflow", 100, "to_pika_select", 2.0)], rows) == []
    assert missed([Bar("qflow", 100, "to_plain", 0.81)], rows) == ["qflow, 100 bytes: to_plain >= 0.81: 0.800"]
    assert missed([Bar("qflow", 1024, "to_plain", 0.1)], rows) == ["qflow, 1024 bytes: to_plain >= 0.1: not measured"]


def test_the_benchmark_document_is_json_with_every_measurement_and_without_passwords() -> None:
    rows = summarize(list(STUBS), STUBS, MEASUREMENTS)
    plan = Plan("amqp://me:secret@host", 1000, (100,), 1000, 3, confirmed=True)
    text = json.dumps(document(plan, STUBS, rows, MEASUREMENTS, {"product": "RabbitMQ", "version": "3.10"}))
    made = json.loads(text)
    assert "secret" not in text
    assert len(made["measurements"]) == 12
    assert made["broker"] == {"product": "RabbitMQ", "version": "3.10"}
    assert {"python", "qflow_client", "pika"} <= set(made["versions"])
    assert made["machine"]["cpus"] >= 1


def test_the_benchmark_table_shows_which_libraries_are_not_installed() -> None:
    table = plain_table("title", summarize(["qflow", "amqpstorm"], STUBS, MEASUREMENTS))
    assert "not installed" in table
    assert len(table.splitlines()) == 4


def test_an_import_error_counts_as_not_installed_only_if_the_measured_library_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(peers.PEERS, "gone", "no_such_library_anywhere:Peer")
    monkeypatch.setitem(peers.PEERS, "typo", "benchmarks.peers.no_such_module:Peer")
    assert peers.load("gone") is None
    with pytest.raises(ModuleNotFoundError):
        peers.load("typo")


def test_the_command_line_options_are_parsed_and_a_wrong_value_ends_the_program() -> None:
    options = parser().parse_args(["--sizes", "100,1024,100", "--peers", "all", "--unconfirmed"])
    assert options.sizes == (100, 1024)
    assert options.peers == tuple(peers.PEERS)
    assert options.unconfirmed
    for wrong in (["--peers", "nobody"], ["--messages", "0"], ["--sizes", "-1"]):
        with pytest.raises(SystemExit):
            parser().parse_args(wrong)
