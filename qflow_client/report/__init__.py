"""Reports on flow logs: which producers were held, why and for how long. On request, a report recommends settings."""

from __future__ import annotations

from qflow_client.report.advice import Advice, AdviceError
from qflow_client.report.reading import FlowLogError, FlowLogs, to_parquet
from qflow_client.report.replay import ReplayResult
from qflow_client.report.report import FlowReport, flow_report

__all__ = [
    "Advice",
    "AdviceError",
    "FlowLogError",
    "FlowLogs",
    "FlowReport",
    "ReplayResult",
    "flow_report",
    "to_parquet",
]
