from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qflow_client.broker import Broker


@dataclass
class Answer:
    status: int
    headers: http.client.HTTPMessage
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def fields(self) -> list[str]:
        """The fields that an error answer (``application/problem+json``) names."""
        assert self.headers["Content-Type"] == "application/problem+json"
        assert self.json["status"] == self.status
        return [error["field"] for error in self.json["errors"]]


class Client:
    """A client of a broker's HTTP API."""

    def __init__(self, broker: Broker, headers: Mapping[str, str] | None = None) -> None:
        self.netloc = broker.http_url.partition("//")[2]
        self.headers = headers or {}

    def __call__(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        raw: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        told = dict(self.headers)
        if body is not None:
            raw = json.dumps(body).encode()
        if raw is not None:
            told["Content-Type"] = "application/json"
        told |= headers or {}
        connection = http.client.HTTPConnection(self.netloc, timeout=20)
        try:
            connection.request(method, path, raw, told)
            response = connection.getresponse()
            return Answer(response.status, response.msg, response.read().decode())
        finally:
            connection.close()
