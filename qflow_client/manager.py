"""The default manager of the producers of this process."""

from __future__ import annotations

from qflow_client.flow import FlowManager
from qflow_client.forks import after_fork_in_child

__all__ = ["flow_manager"]

#: Manages producers without the argument ``manager``, and channels of pika, aio-pika and kombu; see `stop_all` (D5).
flow_manager = FlowManager()

after_fork_in_child(flow_manager.forked)
