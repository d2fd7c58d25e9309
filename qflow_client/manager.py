"""The process's own registry of producers."""

from __future__ import annotations

from qflow_client.flow import FlowManager
from qflow_client.forks import after_fork_in_child

__all__ = ["flow_manager"]

#: Every producer of this process registers here unless told otherwise: `stop_all` and `start_all` reach them all (D5).
flow_manager = FlowManager()

after_fork_in_child(flow_manager.forked)
