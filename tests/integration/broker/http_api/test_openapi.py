from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from qflow_client import Producer
from qflow_client.broker import Broker
from qflow_client.broker.http.operations import api
from tests.effort import rounds

from .tools import Client

schema = schemathesis.openapi.from_dict(api.description(has_token=False))


@pytest.fixture(scope="module", name="url")
def _url() -> Iterator[str]:
    with Broker(http_port=0) as broker:
        broker.declare_queue("orders", arguments={"qpid.flow_stop_count": 1})
        broker.bind("amq.topic", "orders", "orders.#")
        with Producer(broker.url, routing_key="orders") as producer:
            producer.send(b"one")
            producer.send(b"two")
            yield broker.http_url
            # What was tried may have stopped it.
            broker.flow(active=True)
            broker.delete_queue("orders")


# The events have no end; they have tests of their own.
@schema.exclude(path="/api/events").parametrize()
@settings(max_examples=rounds(40))
def test_every_answer_is_one_that_is_described(case: schemathesis.Case[Any], url: str) -> None:
    case.call_and_validate(
        base_url=url,
        checks=[
            not_a_server_error,
            status_code_conformance,
            content_type_conformance,
            response_schema_conformance,
            negative_data_rejection,
        ],
    )


def test_the_description_is_made_once(ask: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ask("GET", "/api/openapi.json").json
    monkeypatch.setattr(type(api), "_schemas", None)
    assert ask("GET", "/api/openapi.json").json == first
