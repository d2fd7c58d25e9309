"""Flow control without a broker: threads that exchange items, and a sensor that cannot wait."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque

from qflow_client.flow import (
    FlowController,
    FlowManager,
    FlowSource,
    RateLimiter,
    Ticket,
    WeightedLine,
    WindowLimiter,
)


class Place(Ticket):
    """A ticket with its item. `entered` shows the waiting thread that the item is in the inbox."""

    def __init__(self, item: str) -> None:
        super().__init__(size=1, source=item)
        self.item = item
        self.entered = False


class Inbox:
    """A bounded queue for threads. The controller decides. The inbox has the lock, the clock and the items."""

    def __init__(self, name: str, capacity: int, weights: dict[str, float]) -> None:
        self.name = name
        self.controller = FlowController(WindowLimiter(capacity), line=WeightedLine(weights), name=name)
        self.items: deque[str] = deque()
        self.deepest = 0
        self.changed = threading.Condition()

    def put(self, item: str, timeout: float) -> None:
        with self.changed:
            place = Place(item)
            self.controller.stand_in_line(place, time.monotonic())
            self.let_in()
            if not self.changed.wait_for(lambda: place.entered, timeout):
                self.controller.leave_line(place)
                self.let_in()
                raise TimeoutError(f"{self.name} is held: {', '.join(map(str, self.controller.gate.holds))}")

    def get(self) -> str:
        with self.changed:
            assert self.changed.wait_for(lambda: self.items, timeout=60)
            item = self.items.popleft()
            self.controller.release(1)
            self.let_in()
            return item

    def let_in(self) -> None:
        """Admit the next items. Called after every change of the controller."""
        while (place := self.controller.grant(time.monotonic())) is not None:
            assert isinstance(place, Place)
            place.entered = True
            self.items.append(place.item)
        self.deepest = max(self.deepest, len(self.items))
        self.changed.notify_all()

    # A manager calls these methods.

    def hold(self, kind: str, *, source: str, detail: str) -> None:
        with self.changed:
            self.controller.gate.hold(kind, now=time.monotonic(), source=source, detail=detail)

    def lift(self, kind: str, *, source: str) -> None:
        with self.changed:
            self.controller.gate.lift(kind, now=time.monotonic(), source=source)
            self.let_in()


inbox = Inbox("inbox", capacity=3, weights={"gold": 3})
manager = FlowManager("shift leader")
manager.register(inbox)

manager.stop_all("lunch")
try:
    inbox.put("iron", timeout=0.1)
    raise AssertionError("it went in although everything is stopped")
except TimeoutError as error:
    print(error)

threads = [threading.Thread(target=inbox.put, args=(metal, 60)) for metal in ["iron", "gold"] * 20]
for thread in threads:
    thread.start()
with inbox.changed:
    assert inbox.changed.wait_for(lambda: inbox.controller.waiting == len(threads), timeout=60)
print(f"{len(threads)} threads wait")

manager.start_all()
first, rest = (Counter(inbox.get() for _ in range(20)) for _ in range(2))
for thread in threads:
    thread.join()
print(f"of the first 20, {first['gold']} are gold, of the rest {rest['gold']}; never more than {inbox.deepest} inside")
assert (first["gold"], rest["gold"], inbox.deepest) == (15, 5, 3)


class Sensor(FlowSource):
    """A sensor that cannot store its readings. While it is blocked it does not measure."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.readings = self.stops = 0

    def on_blocked(self) -> None:
        self.stops += 1


# The caller passes the time. So these ten seconds pass at once.
sensor, entrance = Sensor("thermometer"), FlowController(RateLimiter(10, burst=5))
now = 0.0
while now <= 10.0:
    while not sensor.is_blocked:
        entrance.offer(sensor, 1, now)
        sensor.readings += 1
    ready_at = entrance.ready_at(now)
    assert ready_at is not None
    now = ready_at
    entrance.resume(now)
print(f"10 readings a second, 5 at once: {sensor.readings} in 10 s, stopped {sensor.stops} times")
assert sensor.readings == 5 + 10 * 10 + 1
