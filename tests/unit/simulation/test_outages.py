"""Lost connections, closed channels and refusals, and proof that the simulation would show what can go wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from qflow_client.core.protocol import ProducerProtocol
from qflow_client.core.suspects import PoisonDetector
from qflow_client.receipt import Outcome, Receipt
from tests.effort import rounds

from .life import BrokenContract
from .outages import Outages

STEPS = 8000


@pytest.mark.parametrize("seed", range(rounds(12)))
def test_no_message_is_lost_because_of_lost_connections_closed_channels_or_refusals(seed: int) -> None:
    Outages(seed).live(STEPS)


def test_every_possible_outcome_of_a_message_occurs() -> None:
    outages = Outages(0)
    outages.live(STEPS)
    assert set(outages.counts) == {do.__name__ for do, _ in Outages.STEPS}
    assert outages.refused
    outcomes = {receipt._outcome for receipt in outages.admitted.values()}
    assert outcomes == {Outcome.CONFIRMED, Outcome.REJECTED, Outcome.UNKNOWN}
    assert any(marked for _, marked in outages.queue)


class NeverMarked(ProducerProtocol):
    """What may have arrived leaves again without the mark."""

    def channel_opened(self, channel: int, frame_max: int, now: float, *, restores: bool = False) -> None:
        self.parts.resending.written_before.clear()
        super().channel_opened(channel, frame_max, now, restores=restores)


class MarkedOnlyIfSuspected(ProducerProtocol):
    """Who keeps what is in flight forgets that an earlier channel had it, too."""

    def connection_lost(self, reason: str, now: float, *, reconnects: bool = False, shared: bool = False) -> bool:
        self.parts.resending.written_before.clear()
        return super().connection_lost(reason, now, reconnects=reconnects, shared=shared)


class LastOneLost(ProducerProtocol):
    """Of what is to leave again the last is forgotten."""

    def channel_opened(self, channel: int, frame_max: int, now: float, *, restores: bool = False) -> None:
        super().channel_opened(channel, frame_max, now, restores=restores)
        if self.parts.resending.again:
            self.parts.resending.again.pop()


class NewOnesFirst(ProducerProtocol):
    """What is new may leave before all that is old has."""

    def channel_opened(self, channel: int, frame_max: int, now: float, *, restores: bool = False) -> None:
        super().channel_opened(channel, frame_max, now, restores=restores)
        self.parts.resending.again.reverse()


class OldAnswers(ProducerProtocol):
    """What is unsettled when the connection is lost is taken for confirmed."""

    def connection_lost(self, reason: str, now: float, *, reconnects: bool = False, shared: bool = False) -> bool:
        self.parts.settling.settle_run(self.parts.unconfirmed.oldest, self.written + 1, Outcome.CONFIRMED, now)
        return super().connection_lost(reason, now, reconnects=reconnects, shared=shared)


class FirstIsToBlame(ProducerProtocol):
    """The oldest message is rejected when the channel is closed, alone or not."""

    def channel_closed(self, code: int, text: str, method: tuple[int, int], now: float) -> None:
        first = self.unsettled_receipts[0]
        self.channel.disconnect(text, now)
        self.channel.keep_unsettled(now, (), (first,), (code, text))


class NobodyIsToBlame(ProducerProtocol):
    """A message over which every connection is lost is sent for ever."""

    def connection_lost(self, reason: str, now: float, *, reconnects: bool = False, shared: bool = False) -> bool:
        return super().connection_lost(reason, now, reconnects=reconnects, shared=True)


class AnybodyIsToBlame(ProducerProtocol):
    """Whoever is alone in flight when a connection is lost is given up."""

    class _Hasty(PoisonDetector):
        __slots__ = ()

        @property
        def is_proven(self) -> bool:
            return bool(self.candidate)

        def note_loss(self, in_flight: Sequence[Receipt], settled: int, text: str, now: float) -> Sequence[Receipt]:
            self.candidate = in_flight[0]._number if len(in_flight) == 1 else 0
            return in_flight if self.candidate else ()

    def __init__(self, *arguments: object, **keywords: object) -> None:
        super().__init__(*arguments, **keywords)  # type: ignore[arg-type]  # whatever it takes
        self.parts.resending.poison.__class__ = self._Hasty


class RefusedAndForgotten(ProducerProtocol):
    """A refused message does not leave again."""

    def on_nack(self, tag: int, multiple: bool, now: float) -> None:
        pass


class SettledTwice(ProducerProtocol):
    """What is kept over a loss is settled at once as well."""

    def channel_opened(self, channel: int, frame_max: int, now: float, *, restores: bool = False) -> None:
        super().channel_opened(channel, frame_max, now, restores=restores)
        if self.reports.settled is not None:
            self.reports.settled += self.unsettled_receipts[:1]


#: A bug that few seeds show is looked for from one of them on.
FIRST_SEEDS = {MarkedOnlyIfSuspected: 20, FirstIsToBlame: 5, NobodyIsToBlame: 44}

BUGS: list[Callable[..., ProducerProtocol]] = [
    NeverMarked,
    MarkedOnlyIfSuspected,
    LastOneLost,
    NewOnesFirst,
    OldAnswers,
    FirstIsToBlame,
    NobodyIsToBlame,
    AnybodyIsToBlame,
    RefusedAndForgotten,
    SettledTwice,
]


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: type[ProducerProtocol]) -> None:
    def lives() -> None:
        for seed in range(FIRST_SEEDS.get(bug, 0), 100):
            Outages(seed, bug).live(600)

    with pytest.raises(BrokenContract):
        lives()
