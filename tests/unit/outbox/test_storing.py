from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from qflow_client.outbox import Outbox
from qflow_client.receipt import Outcome, Receipt
from qflow_client.settings import ProducerSettings
from qflow_client.storing import Spilled, StoringProtocol

DAY = 86_400.0


class _Receipt(Spilled, Receipt):
    __slots__ = ("__weakref__", "_id", "_path", "_sequence")


class _Keeper:
    def set(self) -> None:
        pass


def test_a_backlog_all_of_which_is_too_old_holds_nobody(tmp_path: Path) -> None:
    path = tmp_path / "outbox"
    with Outbox(path) as outbox:
        for number in range(3):
            outbox.put(b"old", "", "q", f"id {number}", permit=False)
        outbox.commit()
    settings = ProducerSettings(outbox=str(path), outbox_max_age=60.0, routing_key="q")
    with Outbox(path) as outbox:
        now = time.monotonic()
        protocol: Any = StoringProtocol(
            settings,
            outbox=outbox,
            spilled_type=_Receipt,
            id_prefix="new ",
            receipt_type=Receipt,
            now=now,
            # They are a day older than this one.
            wall_offset=time.time() - now + DAY,
        )
        protocol.keeper = _Keeper()
        protocol.channel_opened(1, 1 << 17, now)
        assert [hold.kind for hold in protocol.gate.holds] == ["outbox"]
        plan = protocol.plan
        protocol.feed(plan, outbox.read(plan.after, 500, 1 << 20), now)
        assert protocol.gate.is_open
        assert not protocol.has_backlog
        assert {receipt.outcome for receipt in protocol.take_failures()} == {Outcome.FAILED}
