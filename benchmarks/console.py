"""Measures the main-thread time of the broker's console for an update, with many active queues and producers."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pika
from playwright.sync_api import Browser, Page, expect, sync_playwright

from qflow_client.broker import Broker

__all__ = ["main", "measure"]

CONNECTIONS = 20
#: Maximum milliseconds of work for an update at p95: one frame of the display.
_FRAME = 16.0
# Maximum seconds that a broker or a page may take to be ready.
_PATIENCE = 400.0
# Milliseconds to wait for the first picture, and until the page is idle after a change.
_FIRST, _NEXT = 5000, 2000
_COUNT = "performance.getEntriesByName('qflow-update').length"
_CATEGORIES = ["blink.user_timing", "disabled-by-default-devtools.timeline", "devtools.timeline"]


@contextmanager
def _busy(broker: Broker, queues: int, producers: int) -> Iterator[None]:
    """Declare queues that turn ON and OFF, and run producers that publish to the queues."""
    for number in range(queues):
        broker.declare_queue(f"queue {number}", arguments={"qpid.flow_stop_count": 3})
    over = threading.Event()

    def publish(numbers: range) -> None:
        connection = pika.BlockingConnection(pika.URLParameters(broker.url))
        channels = [connection.channel() for _ in numbers]
        while not over.is_set():
            for number, channel in zip(numbers, channels, strict=True):
                channel.basic_publish("", f"queue {number % queues}", b"12345")
            for number in numbers[::20]:
                broker.purge(f"queue {number % queues}")
            over.wait(0.2)
            connection.process_data_events(0)
        connection.close()

    bounds = [producers * at // CONNECTIONS for at in range(CONNECTIONS + 1)]
    shares = [range(first, last) for first, last in pairwise(bounds) if first < last]
    threads = [threading.Thread(target=publish, args=(share,)) for share in shares]
    for thread in threads:
        thread.start()
    try:
        broker.wait_until(lambda broker: len(broker.producers()) == producers, _PATIENCE)
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def _work_per_update(trace: list[dict[str, Any]]) -> list[float]:
    """For each update, return the milliseconds of work of the page's main thread until the next update."""
    updates = sorted(
        (event for event in trace if event["name"] == "qflow-update" and event["ph"] == "b"),
        key=lambda each: each["ts"],
    )
    pid = updates[0]["pid"]
    (main_thread,) = {
        event["tid"]
        for event in trace
        if event["name"] == "thread_name" and event["pid"] == pid and event["args"]["name"] == "CrRendererMain"
    }
    starts = [event["ts"] for event in updates]
    work = [0.0] * len(starts)
    for event in trace:
        if event["name"] == "RunTask" and "tdur" in event and (event["pid"], event["tid"]) == (pid, main_thread):
            # An update is marked within a task, so the task of the update ends after the mark.
            at = bisect_right(starts, event["ts"] + event["dur"]) - 1
            if at >= 0:
                work[at] += event["tdur"] / 1000
    return work[1:-1]


def _traced_work(browser: Browser, page: Page, updates: int) -> list[float]:
    """Return the milliseconds of work of each update, sorted."""
    browser.start_tracing(page=page, categories=_CATEGORIES)
    begun = ended = page.evaluate(_COUNT)
    while ended < begun + updates:
        # A request to the page is also work, so there are few requests.
        page.wait_for_timeout(updates * 500)
        ended = page.evaluate(_COUNT)
    return sorted(_work_per_update(json.loads(browser.stop_tracing())["traceEvents"]))


def measure(browser: Browser, queues: int, producers: int, updates: int) -> dict[str, list[float]]:
    """For each view of the page, return the milliseconds of work of each update, sorted.

    Args:
        browser: a Chromium browser.
        updates: number of measured updates for each view.
    """
    with Broker(http_port=0) as broker, _busy(broker, queues, producers):
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.set_default_timeout(_PATIENCE * 1000)
        page.goto(broker.http_url)
        expect(page.locator("#producer-pages")).to_contain_text(f"{producers:,} producers", timeout=_PATIENCE * 1000)
        page.locator("#queue-rows button").first.click()
        page.wait_for_timeout(_FIRST)
        # The page now shows one queue. After it is scrolled to the top, it shows the graph.
        found = {"a queue": _traced_work(browser, page, updates)}
        page.evaluate("scrollTo(0, 0)")
        page.wait_for_timeout(_NEXT)
        found["the graph"] = _traced_work(browser, page, updates)
        page.close()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code is 1 if with ``--check`` an update takes longer than a frame at p95."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.console", description=__doc__)
    parser.add_argument("--queues", type=int, default=500, help="how many (%(default)s)")
    parser.add_argument("--producers", type=int, default=2000, help="how many (%(default)s)")
    parser.add_argument("--updates", type=int, default=45, help="that are measured of each view (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--check", action="store_true", help=f"fail unless each p95 is <= {_FRAME:g} ms, a frame")
    options = parser.parse_args(arguments)
    path = os.environ.get("QFLOW_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        parser.error("Chromium was not found; install it, or set QFLOW_CHROMIUM to its path")
    # pika logs many warnings about Channel.Flow.
    logging.getLogger("pika").setLevel(logging.ERROR)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        work = measure(browser, options.queues, options.producers, options.updates)
        browser.close()
    found = {
        what: {"p50": times[len(times) // 2], "p95": times[int(len(times) * 0.95)]} for what, times in work.items()
    }
    if options.json:
        print(json.dumps({"milliseconds": found}, indent=2))
    else:
        for what, told in found.items():
            print(f"{what}: p50 {told['p50']:.1f} ms, p95 {told['p95']:.1f} ms")
    return int(options.check and any(told["p95"] > _FRAME for told in found.values()))


if __name__ == "__main__":
    sys.exit(main())
