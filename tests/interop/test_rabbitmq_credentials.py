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
    claims = {"aud": ["rabbitmq"], "sub": "app", "scope": rights, "exp": math.ceil(time.time() + LIFE)}
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


async def publish_until(end: Callable[[], bool], kind: type, url: str, **options: Any) -> set[Outcome]:
    """Publish one message after the other, and return what became of them."""

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


def test_E8_replaced_tokens_are_accepted_and_an_expired_token_that_was_not_replaced_is_refused(
    node: OAuthNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Long before they expire, so that a busy machine is not too late.
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
                # The first has expired, and not only the second was used.
                return time.monotonic() > begun + 1.5 * LIFE and issued[kind] >= 4

            # A lost connection would end the producer.
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
