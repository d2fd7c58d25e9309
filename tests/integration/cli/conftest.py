from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import typer.main

from qflow_client.broker import Broker


@pytest.fixture(autouse=True, scope="session")
def _commands_are_made_once() -> Iterator[None]:
    """Typer makes the commands from their signatures for every call, which takes longer than most of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", cache(typer.main.get_command))
        yield


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker() as broker:
        broker.declare_queue("orders")
        yield broker
