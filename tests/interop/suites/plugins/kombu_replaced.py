"""A pytest plugin that replaces kombu's transport for py-amqp by the drop-in."""

from __future__ import annotations

from typing import Any

from kombu.transport import TRANSPORT_ALIASES, pyamqp

import qflow_client.kombu

for _scheme in ("amqp", "pyamqp", "py-amqp"):
    TRANSPORT_ALIASES[_scheme] = TRANSPORT_ALIASES["qflow"]
TRANSPORT_ALIASES["amqps"] = TRANSPORT_ALIASES["qflows"]
_module: Any = pyamqp
for _class in ("Channel", "Connection", "SSLTransport", "Transport"):
    setattr(_module, _class, getattr(qflow_client.kombu, _class))
