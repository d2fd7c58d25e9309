"""The core of the client with a broker that sends any bytes, and what must hold after each piece and at the end."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from qflow_client import Message, ProducerSettings, Receipt
from qflow_client.amqp.frames import FrameError, FrameSplitter
from qflow_client.amqp.tap import Tap
from qflow_client.core.protocol import ProducerProtocol
from qflow_client.flow import Hold

#: Recorded output of brokers, beginning after a first message was confirmed, and data that is not AMQP.
CORPUS = sorted((Path(__file__).parent / "corpus" / "from_brokers").glob("*.bin"))
CHANNEL = 1
FRAME_MAX = 4096
CAPACITY = 8
SENT = 12


@cache
def _settings(capacity: int) -> ProducerSettings:
    # Made once, because fuzzing makes a client for each input.
    return ProducerSettings(routing_key="q", capacity=capacity)


class Client:
    """A tap and a producer, which are driven as by a public producer class."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity = capacity
        self.tap = Tap()
        self.tap.frame_max = FRAME_MAX
        self.protocol = ProducerProtocol(_settings(capacity), id_prefix="p-", now=0.0, wall_offset=0.0)
        self.protocol.reports.settled = []
        self.protocol.reports.events = []
        self.protocol.channel_opened(CHANNEL, FRAME_MAX, 0.0)
        self.tap.attach(CHANNEL, self.protocol, 0.0)
        self.receipts: list[Receipt] = []
        self.passed = b""
        self.is_over = False
        self.now = 0.0
        # The number of bytes that were fed, without the piece with a frame error.
        self.fed = 0

    def send(self) -> None:
        body = b"x" * len(self.receipts)
        payload = Message(body, message_id="own", headers={"k": 1}) if len(self.receipts) % 3 == 2 else body
        receipt = self.protocol.admission.send(payload, "", "q", self.now)
        if receipt is not None:
            self.receipts.append(receipt)

    def write(self) -> None:
        while data := self.tap.data_to_write(1 << 16):
            self.tap.advance(len(data), self.now)

    def receive(self, data: bytes) -> None:
        self.now += 0.01
        try:
            self.passed += self.tap.received(data, self.now)
        except FrameError:
            self.is_over = True
        else:
            self.fed += len(data)
        self.check()

    def check(self) -> None:
        protocol = self.protocol
        # The tap keeps only the beginning of an incomplete frame.
        assert self.tap._splitter.pending <= FRAME_MAX
        done = sum(receipt.done for receipt in self.receipts)
        assert protocol.unsettled == len(self.receipts) - done
        assert 0 <= protocol.window.used <= self.capacity
        assert protocol.window.used >= protocol.unsettled
        assert all(isinstance(hold, Hold) for hold in protocol.reports.holds)
        told = protocol.take_settled(self.now) if protocol.reports.settled else []
        protocol.reported(len(told), self.now)

    def end(self) -> None:
        if self.protocol.channel.number is not None:
            self.tap.detach(CHANNEL)
        self.protocol.connection_lost("the test ends", self.now)
        assert all(receipt.done for receipt in self.receipts)
        assert (self.protocol.unsettled, self.protocol.window.used) == (0, 0)
        # The library gets complete frames.
        splitter = FrameSplitter()
        for _ in splitter.feed(self.passed):
            pass
        assert not splitter.pending


def run(pieces: list[bytes]) -> Client:
    client = Client()
    for piece in pieces:
        if client.protocol.closed is None and len(client.receipts) < SENT:
            client.send()
            client.write()
        client.receive(piece)
        if client.is_over:
            break
    client.end()
    return client
