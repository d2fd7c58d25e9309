"""The default registry of the producers of this process."""

from __future__ import annotations

from qflow_client.flow import FlowManager
from qflow_client.forks import after_fork_in_child

__all__ = ["flow_manager"]

#: The manager of all producers that get no other ``manager``. `stop_all` and `start_all` apply to all of them (D5).
flow_manager = FlowManager()

after_fork_in_child(flow_manager.forked)
