"""Tokens of OAuth 2 on a real RabbitMQ, which refuses what is published with one that has expired."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from qflow_client import AsyncProducer, Credentials, MessageRejected, Outcome, Producer
from qflow_client.testing.rabbitmq import RabbitMQNode

from .test_rabbitmq_producer import PATIENCE

pytestmark = pytest.mark.rabbitmq

# Seconds for which RabbitMQ takes a token, and that the producer is told.
LIFE, TOLD = 5.0, 4.0

KEY = b"the key with which tokens are signed here"
PLUGIN = "[rabbitmq_auth_backend_oauth2].\n"
# A channel looks at the token again every second, instead of every minute.
CONFIGURATION = """[
  {{rabbit, [
    {{auth_backends, [rabbit_auth_backend_oauth2]}},
    {{channel_tick_interval, 1000}}
  ]}},
  {{rabbitmq_auth_backend_oauth2, [
    {{resource_server_id, <<"rabbitmq">>}},
    {{key_config, [
      {{default_key, <<"key">>}},
      {{signing_keys, #{{<<"key">> => {{map, #{{
        <<"kty">> => <<"oct">>, <<"alg">> => <<"HS256">>, <<"kid">> => <<"key">>, <<"k">> => <<"{key}">>
      }}}}}}}}
    ]}}
  ]}}
].
"""


def encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def token() -> str:
    """A JSON web token."""
    head = {"alg": "HS256", "typ": "JWT", "kid": "key"}
    rights = [f"rabbitmq.{right}:*/*" for right in ("read", "write", "configure")]
    claims = {"aud": ["rabbitmq"], "sub": "app", "scope": rights, "exp": int(time.time() + LIFE)}
    signed = ".".join(encoded(json.dumps(part).encode()) for part in (head, claims))
    return f"{signed}.{encoded(hmac.digest(KEY, signed.encode(), 'sha256'))}"


class OAuthNode(RabbitMQNode):
    """A node that takes tokens in the place of passwords."""

    def _prepare(self) -> None:
        super()._prepare()
        (self.directory / "enabled_plugins").write_text(PLUGIN, encoding="ascii")
        (self.directory / "advanced.config").write_text(CONFIGURATION.format(key=encoded(KEY)), encoding="ascii")


@pytest.fixture(scope="module")
def node(session_rabbitmq: Callable[[], RabbitMQNode]) -> Iterator[OAuthNode]:
    # Skips, or fails, where there is no RabbitMQ.
    session_rabbitmq()
    with OAuthNode() as node:
        yield node


def test_E8_an_expired_token_is_refused_if_it_is_not_replaced(node: OAuthNode) -> None:
    url = f"amqp://127.0.0.1:{node.port}/%2F"
    end = time.monotonic() + PATIENCE
    with Producer(url, routing_key="q", declare="q", credentials=lambda: Credentials("", token())) as producer:

        def publish() -> None:
            while time.monotonic() < end:
                producer.send(b"").result(PATIENCE)

        with pytest.raises(MessageRejected, match="403"):
            publish()


@pytest.mark.parametrize("kind", [Producer, AsyncProducer])
def test_E8_tokens_are_replaced_and_no_login_is_refused(
    node: OAuthNode, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Long before they expire, so that a busy machine is not too late.
    monkeypatch.setattr("qflow_client.credentials._PART", 0.3)
    issued = 0

    def issue() -> Credentials:
        nonlocal issued
        issued += 1
        return Credentials("", token(), expires_in=TOLD)

    # A lost connection would end the producer.
    options: dict[str, Any] = {"routing_key": "q", "declare": "q", "credentials": issue, "reconnect_timeout": 0}
    url = f"amqp://127.0.0.1:{node.port}/%2F"
    end = time.monotonic() + 3 * LIFE

    async def tasks() -> set[Outcome]:
        outcomes = set()
        async with AsyncProducer(url, **options) as producer:
            while time.monotonic() < end:
                outcomes.add(await (await producer.send(b"")).result(PATIENCE))
        return outcomes

    def threads() -> set[Outcome]:
        outcomes = set()
        with Producer(url, **options) as producer:
            while time.monotonic() < end:
                outcomes.add(producer.send(b"").result(PATIENCE))
        return outcomes

    assert (asyncio.run(tasks()) if kind is AsyncProducer else threads()) == {Outcome.CONFIRMED}
    assert issued >= 4
