"""The core of the broker: from ``Basic.Publish`` to ``Channel.Flow``. It works without the other rooms.

The way of a publish reads in one direction, from `server` (sockets) over `session` (frames of a connection), `channel`
(content, confirms, being flowed), `virtualhost` (routing) and `queue` (order, marks) to `queueflow` (the flow state of
a queue). Each of these modules imports only modules that stand after it; what stands before is known by a protocol.
"""

from __future__ import annotations

from qflow_client.broker.core.broker import Broker
from qflow_client.broker.core.settings import Settings

__all__ = ["Broker", "Settings"]
