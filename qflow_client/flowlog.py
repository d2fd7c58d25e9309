"""Writes flow logs, which show the holds of producers and the duration of each hold. Each line is a JSON object.

A log consists of many files. Some files may be lost, and a reader may read the files in any order. So each line is
complete: it repeats all facts of earlier lines that a reader needs. A long hold is reported in several lines, one for
each period. Times are integers (microseconds since 1970), because sums of floats depend on the order of the lines.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from qflow_client.events import FlowEvent, FlowEventKind, FlowState
from qflow_client.files import lock, open_private
from qflow_client.flow import Hold
from qflow_client.locks import Lock
from qflow_client.redaction import is_url, shown

__all__ = ["FlowLog", "Line", "ProducerLines", "microseconds"]

_log = logging.getLogger(__name__)

#: One line of a flow log.
Line = dict[str, Any]

_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))

#: The name of an unfinished file begins with this character, because Spark and Hadoop ignore such files.
_UNFINISHED = "_"
# Seconds between two checks for new lines.
_WRITE_PERIOD = 0.1


def _encode(line: Mapping[str, Any]) -> bytes:
    # Replace characters that UTF-8 cannot encode. For example, the reason of a hold may contain the name of a file.
    return _encoder.encode(line).encode(errors="replace") + b"\n"


def microseconds(seconds: float) -> int:
    """Convert seconds to whole microseconds."""
    return round(seconds * 1_000_000)


class ProducerLines:
    """Converts the flow events of one producer to lines, without I/O.

    Args:
        producer: name of the producer.
        queue: destination of the producer, such as ``orders`` (routing key) or ``exchange:key``.
        write: function that is called with each line.
        at: time at which the observation starts, in microseconds since 1970.
        connection: name of the connection. The default is the name of the producer.
    """

    def __init__(
        self, producer: str, queue: str, write: Callable[[Line], object], at: int, connection: str | None = None
    ) -> None:
        self._who = {
            "origin": "producer",
            "producer": producer,
            "connection": producer if connection is None else connection,
            "queue": queue,
        }
        self._write = write
        # For each present hold (kind and source): when it began, and the time up to which lines cover it.
        self._holds: dict[tuple[str, str], tuple[int, int]] = {}
        # The time at which the producer became flowed, and the kind of the hold that caused it; ``None`` if unflowed.
        self._flowed: tuple[int, str] | None = None
        # When the producer last became unflowed (at first, when the observation began), the kind of the hold that had
        # made it flowed, and how many messages it had admitted at that time (-1 if unknown).
        self._free_since, self._free_after, self._free_admitted = at, "", -1

    def event(self, event: FlowEvent) -> None:
        at = microseconds(event.at)
        hold = event.hold
        if event.kind is FlowEventKind.WAITING:
            line = self._line(at, "waiting", "" if hold is None else str(hold.kind), microseconds(event.since))
            line["waiting"] = event.waiting
            self._write(line)
        elif hold is not None and event.kind in (FlowEventKind.FLOWED, FlowEventKind.HOLD_RAISED):
            self._raised(hold, at, event)
        elif hold is not None:
            self._lifted(hold, at, event)

    def _line(self, at: int, kind: str, reason: str, since: int) -> Line:
        return {"at": at, "kind": kind, **self._who, "reason": reason, "since": since}

    def begin(self, state: FlowState, at: int) -> None:
        """Treat the present holds as raised at `at`, so that no line covers the time before the observation."""
        for hold in state.holds:
            self._raised(hold, at, None)

    def _raised(self, hold: Hold, at: int, event: FlowEvent | None) -> None:
        key = (str(hold.kind), hold.source)
        if key in self._holds:
            return
        self._holds[key] = (at, at)
        line = self._line(at, "raised", key[0], at)
        if hold.source:
            line["source"] = hold.source
        if hold.detail:
            line["detail"] = hold.detail
        if event is not None:
            line["unsettled"], line["capacity"] = event.unsettled, event.capacity
        if self._flowed is None:
            self._flowed = (at, key[0])
            if event is not None and self._free_admitted >= 0:
                line["after"] = self._free_after
                line["free_us"] = max(0, at - self._free_since)
                line["free_messages"] = max(0, event.admitted - self._free_admitted)
        self._write(line)

    def _lifted(self, hold: Hold, at: int, event: FlowEvent) -> None:
        key = (str(hold.kind), hold.source)
        since, begun = self._holds.pop(key, (None, None))
        if since is None or begun is None:
            # The hold was raised before the observation and lifted before `begin`, so no line has reported it.
            return
        line = self._line(at, "lifted", key[0], since)
        line["begun"] = begun
        if not self._holds and self._flowed is not None:
            line["flowed_since"], line["first"] = self._flowed
            self._flowed = None
            self._free_since, self._free_after, self._free_admitted = at, line["first"], event.admitted
        self._write(line)

    def tell(self, at: int) -> None:
        """For each present hold, write a line about the time from the hold's last line to `at`, in microseconds."""
        for key, (since, begun) in self._holds.items():
            if at > begun:
                line = self._line(at, "held", key[0], since)
                line["begun"] = begun
                self._holds[key] = (since, at)
                self._write(line)


class _Producer(Protocol):
    """The attributes of `Producer` and `AsyncProducer` that a log uses."""

    @property
    def settings(self) -> Any: ...

    @property
    def flow_state(self) -> FlowState: ...

    @property
    def closed(self) -> bool: ...

    def on_flow(self, callback: Callable[[FlowEvent], object]) -> Callable[[], None]: ...

    def _wall_time(self, now: float) -> float: ...


@dataclass(eq=False, slots=True)
class _Watch:
    """A producer whose flow events are logged, see `FlowLog.watch`."""

    producer: _Producer
    lines: ProducerLines
    unsubscribe: Callable[[], None] = lambda: None

    def tell(self, at: float) -> None:
        """Write lines about the present holds up to `at`, a time of `time.monotonic` in seconds."""
        self.lines.tell(microseconds(self.producer._wall_time(at)))


class FlowLog:
    """A context manager that writes flow events of producers, and of a broker, into the files of a folder.

    Logs of several processes may share a folder. The name of an unfinished file begins with an underscore, so that
    Spark and Hadoop ignore the file. A finished file is renamed. If a crash leaves an unfinished file, the next log in
    the folder finishes it.

    Callbacks of the producers, and a broker's loop, put events into a buffer. A thread writes the lines. If the disk
    is slow or full, and the buffer is full, events are lost, and a later line has their number. A forked child needs
    its own log.

    Args:
        folder: the folder, which is created if it does not exist.
        max_bytes: a file is finished when it has at least this number of bytes.
        max_seconds: a file with at least one line is finished after this number of seconds, even if it is small.
        keep: number of finished files of this `FlowLog` to keep; ``None`` for all. Older files are deleted.
        period: seconds between two lines about the same hold, or about the same queue.
        max_lines: maximum number of lines and events that wait to be written.

    Raises:
        ValueError: the value of an argument is not allowed.
        OSError: the folder cannot be created or written to.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        max_bytes: int = 64 << 20,
        max_seconds: float = 60.0,
        keep: int | None = None,
        period: float = 1.0,
        max_lines: int = 100_000,
    ) -> None:
        for name, value, least in (("max_bytes", max_bytes, 1), ("max_lines", max_lines, 1), ("keep", keep, 1)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ValueError(f"{name}={shown(value)}: it must be a whole number, at least {least}")
        for name, seconds in (("max_seconds", max_seconds), ("period", period)):
            if not seconds > 0:
                raise ValueError(f"{name}={shown(seconds)}: it must be more than 0 seconds")
        if is_url(folder):
            raise ValueError(f"folder={shown(folder)}: it must be the path of a folder, not a URL")
        #: The folder of the files.
        self.folder = Path(folder)
        #: Seconds between two lines about the same hold, or about the same queue.
        self.period = period
        #: Number of lines and events that were dropped so far, because `max_lines` were already waiting.
        self.lost = 0
        self._max_bytes = max_bytes
        self._max_seconds = max_seconds
        self._keep = keep
        self._max_lines = max_lines
        # Waiting lines, and events of producers. The writing thread converts the events to lines.
        self._waiting: deque[Line | tuple[_Watch, FlowEvent]] = deque()
        self._told_lost = 0
        # Lines that were taken from `_waiting`, and that a full disk did not accept yet.
        self._unwritten = b""
        self._watches: list[_Watch] = []
        self._lock = Lock()
        # Protects the file and each `ProducerLines`. Usually only the writing thread takes this lock.
        self._writing = Lock()
        self._finished: deque[Path] = deque()
        self._serial = 0
        self._file: IO[bytes] | None = None
        self._path = self.folder
        self._size = 0
        self._begun_at = 0.0
        self._tell_at = time.monotonic() + period
        self._failed = False
        # The process that created this log. In a forked child, `close` does nothing: the file belongs to the parent.
        self._pid = os.getpid()
        self._stop = threading.Event()
        self._closed = False
        self.folder.mkdir(parents=True, exist_ok=True)
        self._finish_left_behind()
        self._open()
        self._thread = threading.Thread(target=self._run, name=f"qflow-flow-log {self.folder.name}", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    # Adding lines.

    def watch(self, producer: _Producer) -> Callable[[], None]:
        """Write the flow events of a producer from now on.

        Args:
            producer: a `Producer` or an `AsyncProducer`.

        Returns:
            A function that ends the observation. If the producer is closed, the log ends the observation itself.

        Raises:
            RuntimeError: the log is closed, or it was created in the parent of this forked process.
        """
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"the flow log was created in process {self._pid}, and this is process {os.getpid()}: create a flow "
                "log in the child"
            )
        settings = producer.settings
        queue = settings.routing_key if not settings.exchange else f"{settings.exchange}:{settings.routing_key}"
        at = microseconds(producer._wall_time(time.monotonic()))
        lines = ProducerLines(settings.name, queue or "", self.write, at)
        watch = _Watch(producer, lines)
        # Subscribe before reading the present holds, to miss no event. `_raised` ignores a hold that is reported twice.
        watch.unsubscribe = producer.on_flow(lambda event: self._put((watch, event)))
        state = producer.flow_state
        with self._writing:
            lines.begin(state, microseconds(producer._wall_time(time.monotonic())))
        # Check this with the lock, because another thread may be closing the log.
        with self._lock:
            closed = self._closed
            if not closed:
                self._watches.append(watch)
        if closed:
            watch.unsubscribe()
            raise RuntimeError("the flow log is closed; create another one")

        def unwatch() -> None:
            watch.unsubscribe()
            with self._lock:
                if watch in self._watches:
                    self._watches.remove(watch)

        return unwatch

    def write(self, line: Mapping[str, Any]) -> None:
        """Put a line into the queue of the writing thread. Any thread may call this method."""
        self._put(dict(line))

    def _put(self, line: Line | tuple[_Watch, FlowEvent]) -> None:
        if len(self._waiting) >= self._max_lines:
            self.lost += 1
        else:
            self._waiting.append(line)

    # Writing.

    def flush(self) -> None:
        """Write all waiting lines to the file."""
        self._write_waiting()

    def rotate(self) -> None:
        """Finish the present file if it has lines."""
        self._write_waiting()
        with self._writing:
            self._finish()

    def close(self) -> None:
        """Write the waiting lines and one last line for each present hold, and finish the file.

        A second call does nothing, and neither does a call in a forked child.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            watches, self._watches = self._watches, []
        atexit.unregister(self.close)
        for watch in watches:
            watch.unsubscribe()
        self._stop.set()
        self._thread.join()
        try:
            self._write_waiting()
            for watch in watches:
                watch.tell(time.monotonic())
            self._write_waiting()
        finally:
            # Even if the disk is full. Otherwise the file would stay open and unfinished until the process ends.
            with self._writing:
                self._finish(last=True)

    def __enter__(self) -> FlowLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._stop.wait(_WRITE_PERIOD):
            try:
                self._write_waiting()
                if self._file is not None and self._size and time.monotonic() - self._begun_at >= self._max_seconds:
                    with self._writing:
                        self._finish()
                self._failed = False
            except OSError as error:
                # Do not end the thread if the disk is full, because there may be room later.
                if not self._failed:
                    _log.error(
                        "%s: the flow log cannot be written, so lines may be lost: %s", self._path, error.strerror
                    )
                self._failed = True

    def _write_waiting(self) -> None:
        with self._writing:
            # If this raises an error, further lines stay in the buffer. Lines that do not fit there are counted.
            self._write_out()
            lines: list[bytes] = []
            for line in self._take():
                lines.append(_encode(line))
            if self.lost > self._told_lost:
                told, self._told_lost = self._told_lost, self.lost
                line = {"at": microseconds(time.time()), "kind": "lost", "lost": self.lost - told}
                lines.append(_encode(line))
            self._unwritten = b"".join(lines)
            self._write_out()

    def _write_out(self) -> None:
        while self._unwritten and self._file is not None:
            try:
                # If the disk is nearly full, this writes only the beginning.
                written = self._file.write(self._unwritten)
            except OSError as error:
                # Not the path of the file, because `close` renames or deletes the file before the error is shown.
                error.filename = str(self.folder)
                raise
            self._unwritten = self._unwritten[written:]
            self._size += written
        if self._size >= self._max_bytes:
            self._finish()

    def _take(self) -> Iterator[Line]:
        # Read the time before the queue, so that all events up to `at` are handled before `_tell` reports the holds.
        at = time.monotonic()
        yield from self._drain()
        if time.monotonic() >= self._tell_at:
            self._tell_at = time.monotonic() + self.period
            self._tell(at)
            yield from self._drain()

    def _drain(self) -> Iterator[Line]:
        # An event adds at most one line, so 2 × items are enough. The limit ends the loop if other threads add items.
        waiting = self._waiting
        for _ in range(2 * len(waiting)):
            if not waiting:
                return
            item = waiting.popleft()
            if isinstance(item, tuple):
                watch, event = item
                watch.lines.event(event)
            else:
                yield item

    def _tell(self, at: float) -> None:
        with self._lock:
            watches = tuple(self._watches)
        for watch in watches:
            watch.tell(at)
            if watch.producer.closed:
                with self._lock:
                    if watch in self._watches:
                        self._watches.remove(watch)

    # Files.

    def _finish_left_behind(self) -> None:
        """Rename the unfinished files of processes that have ended. The files of running processes are locked."""
        for path in self.folder.glob(f"{_UNFINISHED}*.jsonl"):
            try:
                with path.open("rb") as file:
                    lock(file)
                    path.rename(path.with_name(path.name.removeprefix(_UNFINISHED)))
            except OSError:
                # Another log is writing the file, or has just finished it.
                continue

    def _open(self) -> None:
        self._serial += 1
        name = (
            f"flow-{socket.gethostname()}-{os.getpid()}-{id(self):x}-{time.time_ns() // 1000}-{self._serial:06}.jsonl"
        )
        path = self.folder / f"{_UNFINISHED}{name}"
        self._file = os.fdopen(open_private(path, os.O_WRONLY | os.O_APPEND | os.O_EXCL), "ab", buffering=0)
        self._path = path
        lock(self._file)
        self._size = 0
        self._begun_at = time.monotonic()

    def _finish(self, *, last: bool = False) -> None:
        file, path, size = self._file, self._path, self._size
        if file is None or not (size or last):
            return
        if last:
            self._file = None
        else:
            # If this raises an error, nothing has changed, and a later call tries again.
            self._open()
        if size:
            finished = path.with_name(path.name.removeprefix(_UNFINISHED))
            path.rename(finished)
            self._finished.append(finished)
            while self._keep is not None and len(self._finished) > self._keep:
                self._finished.popleft().unlink(missing_ok=True)
        else:
            path.unlink(missing_ok=True)
        file.close()
