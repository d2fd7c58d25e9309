from __future__ import annotations

import threading
from typing import Any

import amqp
import pytest
from amqp.exceptions import AccessRefused

from qflow_client.broker import Broker, hash_password
from qflow_client.broker.core import logins, passwords


def connect(broker: Broker, password: str, method: str) -> Any:
    return amqp.Connection(f"127.0.0.1:{broker.port}", userid="ann", password=password, login_method=method)


@pytest.mark.parametrize("method", ["PLAIN", "AMQPLAIN"])
def test_py_amqp_can_log_in_with_PLAIN_and_with_AMQPLAIN(method: str) -> None:
    with Broker(users={"ann": "pässwort"}) as broker:
        with connect(broker, "pässwort", method) as connection:
            assert connection.connected
            assert [each.user for each in broker.connections()] == ["ann"]
        with pytest.raises(AccessRefused, match=f"using {method}"):
            connect(broker, "wrong", method).connect()


def test_after_too_many_failed_logins_a_wrong_password_is_refused_and_a_correct_one_is_accepted() -> None:
    with Broker(users={"ann": "right"}, max_failed_logins=1) as broker:
        for _ in range(3):
            with pytest.raises(AccessRefused):
                connect(broker, "wrong", "PLAIN").connect()
        with connect(broker, "right", "PLAIN") as connection:
            assert connection.connected


def test_E8_a_hashed_password_is_checked_on_a_separate_thread_and_the_result_is_cached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = []

    def matches(hashed: str, password: bytes) -> bool:
        threads.append(threading.current_thread().name)
        return passwords.matches(hashed, password)

    monkeypatch.setattr(logins, "matches", matches)
    with Broker(users={"ann": hash_password("sesame")}) as broker:
        assert broker.url == f"amqp://ann@127.0.0.1:{broker.port}/%2F"
        for _ in range(2):
            with connect(broker, "sesame", "PLAIN") as connection:
                assert connection.connected
        with pytest.raises(AccessRefused):
            connect(broker, "wrong", "PLAIN").connect()
    assert [name.startswith("qflow-login") for name in threads] == [True, True]
