"""Flow control as a package of its own (F1): gates, limiters, thresholds, controllers and a registry.

No module here uses AMQP, does I/O, reads a clock or starts a thread. Producers and broker queues use this package.
"""

from __future__ import annotations

from qflow_client.flow.adaptive import AdaptiveWindow
from qflow_client.flow.controller import FifoLine, FlowController, FlowSource, Line, Ticket, WeightedLine
from qflow_client.flow.gate import Gate, Hold
from qflow_client.flow.limiters import CompositeLimiter, Limiter, RateLimiter, SizeLimiter, WindowLimiter
from qflow_client.flow.manager import FlowManager, FlowResource
from qflow_client.flow.thresholds import Capacity, StopResume, ThresholdLimiter, Thresholds

__all__ = [
    "AdaptiveWindow",
    "Capacity",
    "CompositeLimiter",
    "FifoLine",
    "FlowController",
    "FlowManager",
    "FlowResource",
    "FlowSource",
    "Gate",
    "Hold",
    "Limiter",
    "Line",
    "RateLimiter",
    "SizeLimiter",
    "StopResume",
    "ThresholdLimiter",
    "Thresholds",
    "Ticket",
    "WeightedLine",
    "WindowLimiter",
]
