from __future__ import annotations

from typing import Any

import amqp
import pytest
from amqp.exceptions import AccessRefused

from qflow_client.broker import Broker


def connect(broker: Broker, password: str, method: str) -> Any:
    return amqp.Connection(f"127.0.0.1:{broker.port}", userid="ann", password=password, login_method=method)


@pytest.mark.parametrize("method", ["PLAIN", "AMQPLAIN"])
def test_py_amqp_logs_in(method: str) -> None:
    with Broker(users={"ann": "pässwort"}) as broker:
        with connect(broker, "pässwort", method) as connection:
            assert connection.connected
            assert [each.user for each in broker.connections()] == ["ann"]
        with pytest.raises(AccessRefused, match=f"using {method}"):
            connect(broker, "wrong", method).connect()


def test_after_too_many_failed_logins_wrong_ones_are_still_answered_and_a_right_one_gets_in() -> None:
    with Broker(users={"ann": "right"}, max_failed_logins=1) as broker:
        for _ in range(3):
            with pytest.raises(AccessRefused):
                connect(broker, "wrong", "PLAIN").connect()
        with connect(broker, "right", "PLAIN") as connection:
            assert connection.connected
