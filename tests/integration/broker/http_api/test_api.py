from __future__ import annotations

import asyncio
import subprocess
import sys
from urllib.parse import quote

import pika
import pytest

from qflow_client import Producer
from qflow_client.broker import Broker, Policy, PolicyDefinition
from tests.integration.producer.tools import Stopwatch

from .tools import Client


def test_C7_the_json_of_queues_and_channels_has_the_field_names_of_Qpid(broker: Broker, ask: Client) -> None:
    broker.declare_queue("orders", arguments={"qpid.flow_stop_count": 1})
    with Producer(broker.url, routing_key="orders") as producer:
        for _ in range(2):
            producer.send(b"12345")
        broker.wait_until(lambda broker: broker.queue("orders").flow_stopped)
        queue = ask("GET", "/api/queues/orders").json
        assert (queue["flowState"], queue["flowStopped"], queue["flowStoppedCount"]) == (True, True, 1)
        assert (queue["depth"], queue["bytes"], queue["heldConfirms"]) == (2, 10, 1)
        assert queue["thresholds"]["flowStopCount"] == queue["thresholds"]["flowResumeCount"] == 1
        (channel,) = ask("GET", "/api/producers").json
        assert (channel["flowStopped"], channel["flowStoppedCount"], channel["blockedBy"]) == (True, 1, ["orders"])
        assert queue["blocked"] == [channel["name"]]
        assert ask("GET", f"/api/channels/{quote(channel['name'])}").json["published"] == 2
        (connection,) = ask("GET", "/api/connections").json
        assert ask("GET", f"/api/connections/{connection['name']}").json["user"] == "guest"
        states = ask("GET", "/api/flow-states").json
        assert states["queues"][0]["flowStopped"] is True
        assert states["channels"][0]["blockedBy"] == ["orders"]
        counters = ask("GET", "/api/counters").json
        assert (counters["producers"], counters["producersFlowed"], counters["queuesFlowStopped"]) == (1, 1, 1)
        assert (counters["flowStoppedCount"], counters["depth"], counters["published"]) == (1, 2, 2)
        assert ask("POST", "/api/queues/orders/purge").json == {"messages": 2}
        producer.flush(20)
    assert ask("GET", "/api/flow-states").json["channels"] == []


def test_D5_two_producers_are_stopped_without_delay_and_started_again(broker: Broker, ask: Client) -> None:
    broker.declare_queue("orders")
    with Producer(broker.url, routing_key="orders") as one, Producer(broker.url, routing_key="orders") as two:
        events = [one.flow_events(), two.flow_events()]
        for producer in (one, two):
            producer.send(b"x").result(20)
        with Stopwatch() as watch:
            assert ask("POST", "/api/producers/stop").status == 204
            for each in events:
                assert [hold.kind for hold in next(each).holds] == ["channel_flow"]
        assert watch.within(5)
        assert {channel["blockedBy"][0] for channel in ask("GET", "/api/producers").json} == {"operator"}
        assert ask("GET", "/api/counters").json["producersStopped"] is True
        # A producer that connects during the stop is stopped, too.
        with Producer(broker.url, routing_key="orders") as three:
            broker.wait_until(lambda broker: sum(channel.flowed for channel in broker.producers()) == 3)
            assert ask("POST", "/api/producers/start").status == 204
            for producer in (one, two, three):
                producer.send(b"y").result(20)


def test_D5_a_stop_of_one_producer_does_not_hold_another_producer(broker: Broker, ask: Client) -> None:
    broker.declare_queue("orders")
    with Producer(broker.url, routing_key="orders") as one, Producer(broker.url, routing_key="orders") as two:
        one.send(b"x").result(20)
        (name,) = (channel["name"] for channel in ask("GET", "/api/producers").json if channel["published"])
        events = one.flow_events()
        assert ask("POST", f"/api/producers/{quote(name)}/stop").status == 204
        assert next(events).flowed
        two.send(b"y").result(20)
        assert ask("POST", f"/api/producers/{quote(name)}/start").status == 204
        one.send(b"y").result(20)


def test_a_queue_can_be_declared_queried_and_deleted(broker: Broker, ask: Client) -> None:
    body = {"durable": True, "arguments": {"qpid.flow_stop_count": 100, "qpid.flow_resume_count": 70}}
    made = ask("PUT", "/api/queues/orders", body)
    assert (made.status, made.json["durable"], made.json["arguments"]) == (201, True, body["arguments"])
    assert ask("PUT", "/api/queues/orders", body).status == 200
    other = ask("PUT", "/api/queues/orders", {"durable": False})
    assert (other.status, other.fields) == (409, [])
    assert "exists with durable=True, not False" in other.json["detail"]
    broker.publish(b"x", "orders")
    assert ask("DELETE", "/api/queues/orders").json == {"messages": 1}
    gone = ask("DELETE", "/api/queues/orders")
    assert (gone.status, gone.json["detail"]) == (404, "no queue 'orders' in vhost '/'")


@pytest.mark.parametrize("name", ["a/b", "a b", "ä ö", "a%2Fb", "100%", "?", "#", ".", "a+b", "{a}"])
def test_a_queue_name_in_the_path_of_a_url_may_contain_any_characters(broker: Broker, ask: Client, name: str) -> None:
    path = f"/api/queues/{quote(name, safe='')}"
    assert ask("PUT", path, {}).json["name"] == name
    assert [queue.name for queue in broker.queues()] == [name]
    assert ask("GET", path).json["name"] == name
    assert ask("POST", f"{path}/purge").json == {"messages": 0}


@pytest.mark.parametrize(
    ("method", "path", "body", "fields", "words"),
    [
        ("PUT", "/api/queues/q", {"durable": "yes"}, ["durable"], "valid boolean"),
        ("PUT", "/api/queues/q", {"colour": "red"}, ["colour"], "not permitted"),
        ("PUT", "/api/queues/q", [], [""], "object"),
        ("PUT", "/api/queues/q", {"arguments": {"qpid.max_count": "x"}}, ["arguments"], "qpid.max_count='x'"),
        ("PUT", f"/api/queues/{'ä' * 128}", {}, ["name"], "at most 255 bytes in UTF-8, not 256"),
        ("PUT", "/api/exchanges/e", {"type": "round"}, ["type"], "'direct', 'fanout', 'topic' or 'headers'"),
        ("POST", "/api/bindings", {"source": "amq.topic"}, ["destination"], "required"),
        (
            "POST",
            "/api/bindings",
            {"source": "amq.headers", "destination": "orders", "arguments": {"x-match": "some"}},
            ["arguments"],
            "x-match='some'",
        ),
        ("PATCH", "/api/queues/orders/thresholds", {"flowStopCount": -1}, ["flowStopCount"], "greater than or equal"),
        ("PATCH", "/api/queues/orders/thresholds", {"flowStopCount": "5"}, ["flowStopCount"], "valid integer"),
        (
            "PATCH",
            "/api/queues/orders/thresholds",
            {"flowStopCount": 5, "flowResumeCount": 6},
            ["flowStopCount", "flowResumeCount"],
            "flow_stop_count=5 and flow_resume_count=6",
        ),
        ("POST", "/api/definitions", {"queues": [{"durable": True}]}, ["queues[0].name"], "required"),
        ("GET", "/api/events?period=0", None, ["period"], "greater than or equal to 0.1"),
        ("GET", "/api/queues?page=1", None, ["page"], "not permitted"),
        ("GET", "/api/events?period=1&period=2", None, ["period"], "twice"),
    ],
)
def test_a_request_with_an_invalid_field_is_answered_with_400_and_the_name_of_the_field(
    broker: Broker, ask: Client, method: str, path: str, body: object, fields: list[str], words: str
) -> None:
    broker.declare_queue("orders")
    answer = ask(method, quote(path, safe="/?=&"), body)
    assert (answer.status, answer.fields) == (400, fields)
    assert words in answer.json["detail"]
    assert [queue.name for queue in broker.queues()] == ["orders"]


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff", b'{"arguments": {"x": NaN}}', b'{"arguments":' * 5000])
def test_a_request_body_that_is_not_valid_json_is_answered_with_400(ask: Client, raw: bytes) -> None:
    answer = ask("PUT", "/api/queues/q", raw=raw)
    assert (answer.status, answer.fields) == (400, [""])


def test_a_request_body_above_16_MiB_is_answered_with_413(ask: Client) -> None:
    answer = ask("PUT", "/api/queues/q", raw=b" " * (16 * 1024 * 1024 + 1))
    assert (answer.status, answer.fields) == (413, [])


def test_requests_for_missing_or_protected_objects_are_answered_with_a_problem_document(ask: Client) -> None:
    for method, path, status in (
        ("GET", "/nowhere", 404),
        ("GET", "/api/channels/x", 404),
        ("POST", "/api/producers/x/stop", 404),
        ("DELETE", "/api/connections/x", 404),
        ("DELETE", "/api/exchanges/x", 404),
        ("DELETE", "/api/bindings/x", 404),
        ("DELETE", "/api/exchanges/amq.topic", 403),
        ("DELETE", "/api/queues", 405),
    ):
        answer = ask(method, path)
        assert (answer.status, answer.fields) == (status, []), (method, path)


def test_exchanges_and_bindings_can_be_created_and_deleted(broker: Broker, ask: Client) -> None:
    broker.declare_queue("orders")
    assert ask("PUT", "/api/exchanges/shop", {"type": "topic"}).status == 201
    assert ask("PUT", "/api/exchanges/shop", {"type": "topic"}).status == 200
    assert ask("PUT", "/api/exchanges/shop", {"type": "fanout"}).status == 409
    bound = ask("POST", "/api/bindings", {"source": "shop", "destination": "orders", "routingKey": "orders.#"})
    assert (bound.status, bound.json["destinationType"]) == (201, "queue")
    more = {"source": "amq.fanout", "destination": "shop", "destinationType": "exchange"}
    assert ask("POST", "/api/bindings", more).status == 201
    assert broker.publish(b"x", "orders.new", exchange="amq.fanout") == 1
    bindings = ask("GET", "/api/bindings").json
    assert [(each["source"], each["destination"]) for each in bindings] == [("amq.fanout", "shop"), ("shop", "orders")]
    assert bound.json in bindings
    assert ask("DELETE", f"/api/bindings/{bound.json['id']}").status == 204
    assert ask("DELETE", f"/api/bindings/{bound.json['id']}").status == 404
    assert ask("DELETE", "/api/exchanges/shop").status == 204
    assert ask("GET", "/api/bindings").json == []
    assert "shop" not in {exchange["name"] for exchange in ask("GET", "/api/exchanges").json}


def test_an_amqp_connection_can_be_closed_over_http(broker: Broker, ask: Client) -> None:
    connection = pika.BlockingConnection(pika.URLParameters(broker.url))
    (told,) = ask("GET", "/api/connections").json
    assert ask("DELETE", f"/api/connections/{told['name']}").status == 204
    with pytest.raises(pika.exceptions.ConnectionClosedByBroker, match="320"):
        connection.process_data_events(10)


def test_definitions_are_exported_and_imported(broker: Broker, ask: Client) -> None:
    broker.declare_queue("orders", durable=True, arguments={"qpid.flow_stop_count": 5})
    broker.declare_exchange("shop", "headers", durable=True)
    broker.bind("shop", "orders", arguments={"x-match": "any", "kind": "order"})
    broker.set_policy(Policy("narrow", PolicyDefinition(max_count=9), "^orders$"))
    document = ask("GET", "/api/definitions").json
    with Broker(http_port=0) as other:
        answer = Client(other)("POST", "/api/definitions", document | {"users": [], "policies": []})
        assert answer.json == {
            "exchanges": 1,
            "queues": 1,
            "bindings": 1,
            "policies": 1,
            "ignored": ["policies", "users"],
        }
        assert other.queues() == broker.queues()
        assert other.exchanges() == broker.exchanges()
        assert other.bindings() == broker.bindings()
        assert other.policies == broker.policies
        # Objects that already exist with the same definition stay.
        assert Client(other)("POST", "/api/definitions", document).status == 200
        assert Client(other)("GET", "/api/definitions").json == document


def test_definitions_that_RabbitMQ_has_exported_can_be_imported(broker: Broker, ask: Client) -> None:
    document = {
        "rabbit_version": "3.10.8",
        "users": [{"name": "guest", "password_hash": "x", "tags": ["administrator"]}],
        "vhosts": [{"name": "/"}],
        "queues": [{"name": "q", "vhost": "/", "durable": True, "auto_delete": False, "arguments": {}, "type": "x"}],
        "exchanges": [
            {
                "name": "e",
                "vhost": "/",
                "type": "fanout",
                "durable": True,
                "auto_delete": False,
                "internal": False,
                "arguments": {},
            }
        ],
        "bindings": [
            {
                "source": "e",
                "vhost": "/",
                "destination": "q",
                "destination_type": "queue",
                "routing_key": "",
                "arguments": {},
            }
        ],
    }
    assert ask("POST", "/api/definitions", document).json["ignored"] == ["rabbit_version", "users", "vhosts"]
    assert broker.publish(b"x", "", exchange="e") == 1


@pytest.mark.parametrize(
    ("wrong", "field", "words"),
    [
        ({"queues": [{"name": "q", "arguments": {"qpid.max_count": -1}}]}, "queues[0]", "qpid.max_count=-1"),
        ({"queues": [{"name": "new"}, {"name": "there", "durable": True}]}, "queues[1]", "durable=False, not True"),
        ({"queues": [{"name": "q", "vhost": "other"}]}, "queues[0]", "'other'"),
        ({"queues": [{"name": ""}]}, "queues[0]", "must not be empty"),
        (
            {
                "exchanges": [{"name": "new", "type": "fanout"}],
                "queues": [{"name": "new"}],
                "bindings": [
                    {"source": "leaving", "destination": "new"},
                    {"source": "new", "destination": "none"},
                ],
            },
            "bindings[1]",
            "no queue 'none'",
        ),
        (
            {"queue_policies": [{"name": "p", "definition": {"max_cont": 1}}]},
            "queue_policies[0]",
            "did you mean 'max_count'?",
        ),
        ({"queue_policies": [{"colour": "red"}]}, "queue_policies[0]", "colour"),
        (
            {
                "queue_policies": [
                    {"name": "p", "definition": {"max_count": 1}},
                    {"name": "q", "definition": {"capacity": 5, "flow_resume_capacity": 5}, "pattern": "("},
                ]
            },
            "queue_policies[1]",
            "not a regular expression",
        ),
    ],
)
def test_definitions_are_imported_as_a_whole_or_not_at_all(
    broker: Broker, ask: Client, wrong: object, field: str, words: str
) -> None:
    broker.declare_queue("there")
    # This exchange is deleted with its last binding. The rollback of the import must not delete it.
    broker.declare_exchange("leaving", auto_delete=True)
    before = broker.queues(), broker.exchanges(), broker.bindings(), broker.policies
    answer = ask("POST", "/api/definitions", wrong)
    assert (answer.status, answer.fields) == (400, [field])
    assert words in answer.json["detail"]
    assert (broker.queues(), broker.exchanges(), broker.bindings(), broker.policies) == before


def test_exported_definitions_omit_exclusive_queues(broker: Broker, ask: Client) -> None:
    connection = pika.BlockingConnection(pika.URLParameters(broker.url))
    channel = connection.channel()
    channel.queue_declare("mine", exclusive=True)
    channel.queue_bind("mine", "amq.fanout")
    assert ask("GET", "/api/queues/mine").json["exclusive"] is True
    assert ask("GET", "/api/definitions").json == {"exchanges": [], "queues": [], "bindings": [], "queue_policies": []}
    connection.close()


def test_values_that_json_cannot_represent_become_escaped_text_or_null(broker: Broker, ask: Client) -> None:
    broker.declare_queue("q", arguments={"raw": b"\xff", "much": float("inf")})
    assert ask("GET", "/api/queues/q").json["arguments"] == {"raw": "\\xff", "much": None}


def test_a_broker_without_http_does_not_import_the_libraries_for_http() -> None:
    code = """
import sys
import qflow_client
from qflow_client.broker import Broker, Policy, PolicyDefinition
with Broker() as broker:
    found = sorted({"aiohttp", "pydantic", "prometheus_client"} & set(sys.modules))
    assert not found, found
    try:
        broker.http_url
    except RuntimeError as error:
        assert "give it an http_port" in str(error)
    else:
        raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_without_aiohttp_the_error_for_an_http_port_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qflow_client.broker.settings.find_spec", lambda name: None if name == "aiohttp" else name)
    with pytest.raises(ValueError, match=r"HTTP needs aiohttp: pip install 'qflow-client\[broker\]'"):
        Broker(http_port=0)
    Broker()


def test_a_broker_whose_http_port_is_in_use_does_not_start(broker: Broker) -> None:
    port = int(broker.http_url.rpartition(":")[2])
    second = Broker(http_port=port)
    with pytest.raises(OSError, match=rf"cannot listen on 127\.0\.0\.1:{port}: "), second:
        pass


def test_the_http_server_runs_on_the_event_loop_of_the_application() -> None:
    async def run() -> None:
        async with Broker(http_port=0) as broker:
            answer = await asyncio.to_thread(Client(broker), "PUT", "/api/queues/orders", {})
            assert answer.status == 201
            assert [queue.name for queue in broker.queues()] == ["orders"]

    asyncio.run(run())


def test_D3_policies_can_be_set_replaced_and_deleted_and_change_the_thresholds_of_queues(
    broker: Broker, ask: Client
) -> None:
    broker.declare_queue("orders")
    for _ in range(3):
        broker.publish(b"x", "orders")
    body = {"pattern": "^orders$", "definition": {"flowStopCount": 2}}
    made = ask("PUT", "/api/policies/narrow", body)
    assert (made.status, made.json["name"], made.json["applyTo"]) == (201, "narrow", "queues")
    assert (made.json["definition"]["flowStopCount"], made.json["definition"]["maxCount"]) == (2, None)
    queue = ask("GET", "/api/queues/orders").json
    assert (queue["flowStopped"], queue["policies"], queue["thresholds"]["flowStopCount"]) == (True, ["narrow"], 2)
    # A threshold that the operator sets on one queue has priority over the policy.
    ask("PATCH", "/api/queues/orders/thresholds", {"flowStopCount": 9})
    assert ask("PUT", "/api/policies/narrow", body | {"priority": 5}).status == 200
    assert broker.queue("orders").thresholds.flow_stop_count == 9
    assert [policy["priority"] for policy in ask("GET", "/api/policies").json] == [5]
    assert ask("DELETE", "/api/policies/narrow").status == 204
    gone = ask("DELETE", "/api/policies/narrow")
    assert (gone.status, gone.json["detail"]) == (404, "there is no policy 'narrow'; the policies are: none")
    assert broker.queue("orders").thresholds.flow_stop_count == 9


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        ({}, ["definition"]),
        ({"definition": {}}, ["definition"]),
        ({"definition": {"maxCont": 1}}, ["definition.maxCont"]),
        ({"definition": {"maxCount": -1}}, ["definition.maxCount"]),
        ({"definition": {"policy": "none"}}, ["definition.policy"]),
        (
            {"definition": {"flowStopCount": 1, "flowResumeCount": 2}},
            ["definition.flowStopCount", "definition.flowResumeCount"],
        ),
        ({"definition": {"maxCount": 1}, "pattern": "("}, ["pattern"]),
        ({"definition": {"maxCount": 1}, "applyTo": "all"}, ["applyTo"]),
        ({"definition": {"maxCount": 1}, "applyTo": "routing_keys"}, ["applyTo", "routingKey"]),
    ],
)
def test_an_invalid_policy_is_answered_with_400_and_the_name_of_the_invalid_field(
    broker: Broker, ask: Client, body: object, fields: list[str]
) -> None:
    answer = ask("PUT", "/api/policies/narrow", body)
    assert (answer.status, answer.fields) == (400, fields)
    assert broker.policies == ()


def test_F6_rate_limits_can_be_set_and_removed(broker: Broker, ask: Client) -> None:
    broker.declare_queue("orders")
    path = "/api/rate-limits/queue/orders"
    made = ask("PUT", path, {"messages": 0.01})
    told = {"applyTo": "queue", "name": "orders", "messages": 0.01, "bytes": None, "burst": 0.1}
    assert (made.status, made.json) == (201, told)
    assert ask("PUT", path, {"messages": 0.01}).status == 200
    assert ask("GET", "/api/rate-limits").json == [told]
    with Producer(broker.url, routing_key="orders") as producer:
        for _ in range(2):
            producer.send(b"x")
        broker.wait_until(lambda broker: broker.producers()[0].flowed)
        assert ask("DELETE", path).status == 204
        broker.wait_until(lambda broker: not broker.producers()[0].flowed)
    assert ask("DELETE", path).status == 404


@pytest.mark.parametrize(
    ("path", "body", "fields"),
    [
        ("queue/orders", {}, ["messages", "bytes"]),
        ("queue/orders", {"messages": 0}, ["messages"]),
        ("queue/orders", {"bytes": -1}, ["bytes"]),
        ("queue/orders", {"messages": 1, "burst": 0}, ["burst"]),
        ("queue/orders", {"messages": "1"}, ["messages"]),
        ("queue/orders", {"bytes": 1e200, "burst": 1e200}, ["bytes", "burst"]),
        ("host/orders", {"messages": 1}, ["scope"]),
    ],
)
def test_an_invalid_rate_limit_is_answered_with_400_and_the_name_of_the_invalid_field(
    broker: Broker, ask: Client, path: str, body: object, fields: list[str]
) -> None:
    answer = ask("PUT", f"/api/rate-limits/{path}", body)
    assert (answer.status, answer.fields) == (400, fields)
    assert broker.rate_limits == ()
