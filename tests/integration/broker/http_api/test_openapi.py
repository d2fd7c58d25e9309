from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from qflow_client import Producer
from qflow_client.broker import Broker
from qflow_client.broker.http.operations import api
from tests.effort import EFFORT, rounds

from .tools import Client

_CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
)
# Run schemathesis as a program. Its import takes seconds, and its pytest plugin would add these to every test run.
_SCHEMATHESIS = [
    *(sys.executable, "-m", "schemathesis.cli", "run"),
    f"--checks={','.join(_CHECKS)}",
    # An event stream has no end. It is tested separately.
    "--exclude-path=/api/events",
    "--phases=fuzzing" if EFFORT == "quick" else "--phases=examples,coverage,fuzzing",
    f"--max-examples={rounds(10, least=2)}",
    "--continue-on-failure",
    "--no-color",
    *(() if EFFORT == "nightly" else ("--generation-deterministic",)),
]


@pytest.mark.program
def test_every_http_response_matches_the_openapi_description(tmp_path: Path) -> None:
    with Broker(http_port=0) as broker:
        broker.declare_queue("orders", arguments={"qpid.flow_stop_count": 1})
        broker.bind("amq.topic", "orders", "orders.#")
        with Producer(broker.url, routing_key="orders", mandatory=False) as producer:
            producer.send(b"one")
            producer.send(b"two")
            url = f"{broker.http_url}/api/openapi.json"
            ran = subprocess.run([*_SCHEMATHESIS, url], cwd=tmp_path, capture_output=True, text=True, check=False)
            # A generated request may have stopped the producer or deleted its queue.
            broker.declare_queue("orders", arguments={"qpid.flow_stop_count": 1})
            broker.delete_queue("orders")
            broker.flow(active=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = re.search(r"Selected: (\d+)/(\d+)\n +Tested: (\d+)", ran.stdout)
    assert found, ran.stdout
    assert int(found[1]) == int(found[2]) - 1 == int(found[3])


def test_openapi_lists_the_response_503_for_each_request_that_a_memory_limit_may_refuse(ask: Client) -> None:
    paths = ask("GET", "/api/openapi.json").json["paths"]
    assert {path for path, has in paths.items() if "503" in has.get("get", {}).get("responses", {})} == {
        "/metrics",
        *(f"/api/{path}" for path in ("connections", "channels", "producers", "queues", "exchanges", "bindings")),
        *(f"/api/{path}" for path in ("policies", "rate-limits", "flow-states", "definitions")),
    }


def test_openapi_has_a_sentence_for_every_operation_every_parameter_and_every_field() -> None:
    told = api.description(has_token=True)
    texts = {name: schema["description"] for name, schema in told["components"]["schemas"].items() if len(schema) > 1}
    for name, schema in told["components"]["schemas"].items():
        texts |= {f"{name}.{field}": of["description"] for field, of in schema.get("properties", {}).items()}
    for path, methods in told["paths"].items():
        for method, operation in methods.items():
            texts[f"{method} {path}"] = operation["summary"]
            texts |= {
                f"{method} {path} {each['name']}": each["description"] for each in operation.get("parameters", [])
            }
    assert len(texts) > 250
    # The ids of the specification mean nothing to users of the API.
    assert [name for name, text in texts.items() if not re.fullmatch(r"(?!.*\([A-Z]\d+\))[A-Z].*\.", text)] == []


def test_the_openapi_description_is_generated_once(ask: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ask("GET", "/api/openapi.json").json
    monkeypatch.setattr(type(api), "_schemas", None)
    assert ask("GET", "/api/openapi.json").json == first
