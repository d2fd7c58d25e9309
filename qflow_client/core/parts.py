"""Makes the parts of one producer's protocol, and connects them. The opening of `protocol` describes the parts.

The constructor of a part gets the other parts that it uses. So a part uses only parts that were made earlier. Code that
uses all parts is in `consequences`.
"""

from __future__ import annotations

from qflow_client.amqp.frames import PublishEncoder
from qflow_client.core.admission import Admission
from qflow_client.core.channel import Channel
from qflow_client.core.expiry import Expiry
from qflow_client.core.limits import Limits
from qflow_client.core.refusals import Pauses
from qflow_client.core.reporting import Reports
from qflow_client.core.resending import Resending
from qflow_client.core.returns import Returns
from qflow_client.core.sendline import SendLine
from qflow_client.core.settling import Settling
from qflow_client.core.step import Steps
from qflow_client.core.unconfirmed import Unconfirmed
from qflow_client.core.unreported import Unreported
from qflow_client.core.waiters import Waiters
from qflow_client.core.writing import Writing
from qflow_client.flow import Line
from qflow_client.receipt import Receipt
from qflow_client.settings import ProducerSettings

__all__ = ["Parts"]


class Parts:
    """The parts of one producer's protocol. The arguments are those of `ProducerProtocol`."""

    def __init__(
        self,
        settings: ProducerSettings,
        *,
        id_prefix: str,
        receipt_type: type[Receipt],
        now: float,
        wall_offset: float,
        line: Line | None,
        retries: Pauses | None,
        encoder: type[PublishEncoder],
    ) -> None:
        prefix = id_prefix if settings.message_ids else None
        self.steps = Steps(now)
        self.limits = Limits(settings, line)
        self.controller = self.limits.controller
        self.gate = self.controller.gate
        self.reports = Reports(
            settings.name,
            self.gate,
            wall_offset,
            self._counts,
            max_failed_bytes=settings.max_failed_bytes,
            max_events=settings.max_flow_events,
        )
        self.unreported = Unreported(self.reports, self.limits)
        self.unconfirmed = Unconfirmed()
        self.resending = Resending(settings.reconnect_delay_max, retries, settings.retry_for)
        self.resending.refusals.stop_clock(now)
        self.returns = Returns(settings.is_mandatory, prefix, self.unconfirmed, self.resending)
        self.admission = Admission(
            settings, self.limits, self.returns, self.steps, id_prefix=prefix, receipt_type=receipt_type
        )
        self.waiters = Waiters(self.reports, self.limits, self.admission, self.steps)
        self.line = SendLine(
            self.admission,
            self.controller,
            self.reports,
            self.waiters,
            self.steps,
            settings.flow_control_wait_notify_period,
        )
        self.settling = Settling(
            self.admission,
            self.limits,
            self.reports,
            self.returns,
            self.unconfirmed,
            self.resending,
            settings.confirms,
            keeps_undelivered=settings.keeps_undelivered,
        )
        self.channel = Channel(
            settings, prefix, encoder, self.admission, self.reports, self.unconfirmed, self.resending, self.settling
        )
        self.writing = Writing(self.admission, self.unconfirmed, self.resending, self.channel)
        timeout = settings.delivery_timeout
        #: Finds messages that are unsettled for too long; ``None`` without `delivery_timeout`.
        self.expiry = None if timeout is None else Expiry(timeout, now)

    def _counts(self) -> tuple[int, int, int]:
        window = self.limits.window
        return self.admission.admitted, window.used, window.capacity
