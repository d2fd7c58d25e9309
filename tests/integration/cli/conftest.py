from __future__ import annotations

from collections.abc import Iterator

import pytest

import tests.integration.cli.commands  # noqa: F401  # creates the commands once
from qflow_client.broker import Broker
from tests.integration.producer.tools import PATIENCE


@pytest.fixture(autouse=True)
def _no_settings(no_settings_from_outside: None) -> None:
    """Remove the settings of the environment. Tests and other fixtures set the settings that they need."""


@pytest.fixture(autouse=True)
def _patient_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """At their end, commands in this process wait long for missing confirms."""
    for name in ("outbox", "sending"):
        monkeypatch.setattr(f"qflow_client.cli.{name}._GRACE", PATIENCE)


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker() as broker:
        broker.declare_queue("orders")
        yield broker
