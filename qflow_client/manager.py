"""The process's own registry of producers."""

from __future__ import annotations

import os

from qflow_client.flow import FlowManager

__all__ = ["flow_manager"]

#: Every producer of this process registers here unless told otherwise: `stop_all` and `start_all` reach them all (D5).
flow_manager = FlowManager()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=flow_manager.forked)
