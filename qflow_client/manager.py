"""The default manager of the producers of this process."""

from __future__ import annotations

from qflow_client.flow import FlowManager
from qflow_client.forks import after_fork_in_child

__all__ = ["flow_manager"]

#: The manager of the producers without an argument ``manager`` and of the drop-ins' channels; see its `stop_all` (D5).
flow_manager = FlowManager()

after_fork_in_child(flow_manager.forked)
