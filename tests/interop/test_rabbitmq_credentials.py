"""OAuth 2 tokens on a real RabbitMQ, which refuses messages of a connection whose token has expired."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from qflow_client import AsyncProducer, Credentials, MessageRejected, Outcome, Producer
from qflow_client.testing.rabbitmq import RabbitMQNode

from .test_rabbitmq_producer import PATIENCE

pytestmark = pytest.mark.rabbitmq

# Seconds for which RabbitMQ accepts a token, and the shorter time that the producer gets as `expires_in`.
LIFE, TOLD = 5.0, 4.0

KEY = b"the key with which tokens are signed here"
PLUGIN = "[rabbitmq_auth_backend_oauth2].\n"
# RabbitMQ checks the token of a channel every second, instead of every minute.
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
    """Return a new JSON web token."""
    head = {"alg": "HS256", "typ": "JWT", "kid": "key"}
    rights = [f"rabbitmq.{right}:*/*" for right in ("read", "write", "configure")]
    claims = {"aud": ["rabbitmq"], "sub": "app", "scope": rights, "exp": math.ceil(time.time() + LIFE)}
    signed = ".".join(encoded(json.dumps(part).encode()) for part in (head, claims))
    return f"{signed}.{encoded(hmac.digest(KEY, signed.encode(), 'sha256'))}"


class OAuthNode(RabbitMQNode):
    """A node that accepts tokens instead of passwords."""

    def _prepare(self) -> None:
        super()._prepare()
        (self.directory / "enabled_plugins").write_text(PLUGIN, encoding="ascii")
        (self.directory / "advanced.config").write_text(CONFIGURATION.format(key=encoded(KEY)), encoding="ascii")


@pytest.fixture(scope="module")
def node(session_rabbitmq: Callable[[], RabbitMQNode]) -> Iterator[OAuthNode]:
    # This skips the tests, or fails, if RabbitMQ is not installed.
    session_rabbitmq()
    with OAuthNode() as node:
        yield node


async def publish_until(end: Callable[[], bool], kind: type, url: str, **options: Any) -> set[Outcome]:
    """Publish one message after another, and return all outcomes."""

    def threads() -> set[Outcome]:
        outcomes = set()
        with Producer(url, **options) as producer:
            while not end():
                outcomes.add(producer.send(b"").result(PATIENCE))
        return outcomes

    if kind is Producer:
        return await asyncio.to_thread(threads)
    outcomes = set()
    async with AsyncProducer(url, **options) as producer:
        while not end():
            outcomes.add(await (await producer.send(b"")).result(PATIENCE))
    return outcomes


def test_E8_messages_are_confirmed_with_renewed_tokens_and_rejected_with_an_expired_token(
    node: OAuthNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Renew tokens long before they expire, so that a busy machine is not too late.
    monkeypatch.setattr("qflow_client.credentials._PART", 0.1)
    issued: Counter[type] = Counter()

    async def main() -> None:
        begun = time.monotonic()
        url, queue = f"amqp://127.0.0.1:{node.port}/%2F", {"routing_key": "q", "declare": "q"}

        async def replaced(kind: type) -> None:
            def issue() -> Credentials:
                issued[kind] += 1
                return Credentials("", token(), expires_in=TOLD)

            def end() -> bool:
                # Continue until the first token has expired and at least four tokens were issued.
                return time.monotonic() > begun + 1.5 * LIFE and issued[kind] >= 4

            # With this setting, a lost connection ends the producer.
            options: dict[str, Any] = {"credentials": issue, "reconnect_timeout": 0}
            outcomes = await publish_until(end, kind, url, **queue, **options)
            assert outcomes == {Outcome.CONFIRMED}

        async def expired() -> None:
            once: dict[str, Any] = {"credentials": lambda: Credentials("", token())} | queue
            with pytest.raises(MessageRejected, match="403"):
                await publish_until(lambda: time.monotonic() > begun + PATIENCE, Producer, url, **once)

        async with asyncio.TaskGroup() as all_at_once:
            for each in (replaced(Producer), replaced(AsyncProducer), expired()):
                all_at_once.create_task(each)

    asyncio.run(main())
