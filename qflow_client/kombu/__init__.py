"""kombu (and Celery) with flow control: ``broker_url = "qflow://…"`` instead of ``"pyamqp://…"``.

This package adds flow control to kombu's transport for py-amqp. If the package is installed, kombu finds the transport
when kombu loads its serializers. Each program that declares, publishes or consumes loads the serializers, for example a
Celery application. A program that only connects has to import ``qflow_client.kombu``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kombu.transport import TRANSPORT_ALIASES

if TYPE_CHECKING:
    from qflow_client.kombu.channel import Channel
    from qflow_client.kombu.connection import Connection
    from qflow_client.kombu.transport import SSLTransport, Transport

__all__ = ["Channel", "Connection", "SSLTransport", "Transport"]

# kombu has no entry point for transports, so this package uses the entry point for serializers. This object is
# registered as a serializer, but never encodes or decodes, because no message has this content type.
NO_SERIALIZER = (None, None, "application/x-qflow-transport", "binary")

TRANSPORT_ALIASES["qflow"] = "qflow_client.kombu:Transport"
TRANSPORT_ALIASES["qflows"] = "qflow_client.kombu:SSLTransport"

# kombu loads this module when kombu is only partly imported. So these classes, which need more of kombu, are imported
# at first use.
_LATER = {"Channel": "channel", "Connection": "connection", "SSLTransport": "transport", "Transport": "transport"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
    return value
