"""Readiness probes of several producers (E12)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import cast

import pytest

from qflow_client import FlowState
from qflow_client.flow import Hold
from qflow_client.health import HasHealth, Health, wsgi_readiness


def _producer(name: str, *holds: Hold) -> HasHealth:
    health = Health.of(FlowState(holds, None, 0, {}), unsettled=0, stored=0, spills=False)
    return cast("HasHealth", SimpleNamespace(name=name, health=lambda: health))


def _ask(*producers: HasHealth) -> tuple[str, Mapping[str, Mapping[str, object]]]:
    statuses: list[str] = []
    body = b"".join(wsgi_readiness(*producers)({}, lambda status, _headers: statuses.append(status)))
    return statuses[0], json.loads(body)


@pytest.mark.parametrize("is_first", [True, False])
def test_E12_the_readiness_probe_is_not_ready_if_one_of_two_producers_with_the_same_name_is_not(is_first: bool) -> None:
    producers = [_producer("producer", Hold("disconnected", 1.0)), _producer("producer")]
    status, body = _ask(*(producers if is_first else reversed(producers)))
    assert status == "503 Service Unavailable"
    assert body["producer"]["state"] == "disconnected"
