"""Count what an update of the console does: writes to the page, values sent to the page and steps of the worker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pika
from playwright.sync_api import Browser, Page, Route, expect

from qflow_client.broker import Broker
from tests.browser.conftest import PATIENCE

#: Numbers of queues. Each has one producer. Both numbers are higher than the page shows at once.
SMALL, LARGE = 40, 240
CONNECTIONS = 4

# This script runs before the page's scripts. An update is one message of the worker. The observer is called after it.
_COUNT_UPDATES = """
window.told = [];
window.writes = [];
const count = (value) => typeof value === "object" && value !== null
    ? Object.values(value).reduce((sum, each) => sum + count(each), 1)
    : 1;
window.Worker = class extends Worker {
    constructor(...given) {
        super(...given);
        this.addEventListener("message", ({ data }) => {
            if (data.kind === "view") {
                const { news, detail, steps, ...rest } = data;
                window.told.push({ values: count(rest), graph: rest.graph !== null, steps });
            }
        });
    }
};
new MutationObserver((all) => window.writes.push(all.length))
    .observe(document, { subtree: true, childList: true, attributes: true, characterData: true });
"""

# This script runs before the worker's script. It counts the accesses to maps, sets and arrays for each message.
_COUNT_STEPS = """
let steps = 0;
const counted = (type, names, size) => {
    for (const name of names) {
        const own = type.prototype[name];
        type.prototype[name] = function (...given) {
            steps += size(this);
            return own.apply(this, given);
        };
    }
};
counted(Map, ["get", "set", "has", "delete"], () => 1);
counted(Set, ["has", "add", "delete"], () => 1);
counted(Map, ["values", "keys", "entries", Symbol.iterator, "forEach"], (all) => all.size);
counted(Set, ["values", "forEach", Symbol.iterator], (all) => all.size);
counted(
    Array,
    ["filter", "map", "forEach", "find", "findIndex", "some", "every", "includes", "indexOf", "sort", "values"],
    (all) => all.length,
);
counted(Array, [Symbol.iterator], (all) => all.length);
const post = self.postMessage;
self.postMessage = (message, ...more) => {
    const of = steps;
    steps = 0;
    post.call(self, { ...message, steps: of }, ...more);
};
"""


@contextmanager
def producers(broker: Broker, count: int) -> Iterator[None]:
    """Declare queues, and publish to each queue with a separate producer."""
    for number in range(count):
        broker.declare_queue(f"queue {number}", arguments={"qpid.flow_stop_count": 4})
    connections = [pika.BlockingConnection(pika.URLParameters(broker.url)) for _ in range(CONNECTIONS)]
    try:
        for number in range(count):
            channel = connections[number % CONNECTIONS].channel()
            channel.basic_publish("", f"queue {number}", b"12345")
        broker.wait_until(lambda broker: all(queue.depth for queue in broker.queues()), PATIENCE)
        assert len(broker.producers()) == count
        yield
    finally:
        for connection in connections:
            connection.close()


def shows(page: Page, messages: int) -> None:
    """Wait until the page shows this number of messages in all queues."""
    expect(page.locator("#counters div").filter(has_text="messages").locator("dd")).to_have_text(f"{messages:,}")


def an_update(browser: Browser, count: int) -> dict[str, Any]:
    """Return the maximum work of one update with `count` queues and producers."""

    def add_counting(route: Route) -> None:
        answer = route.fetch()
        # The imports of a module run before the counting starts.
        route.fulfill(response=answer, body=_COUNT_STEPS + answer.text())

    context = browser.new_context(viewport={"width": 1400, "height": 4000})
    try:
        with Broker(http_port=0) as broker, producers(broker, count):
            page = context.new_page()
            page.add_init_script(_COUNT_UPDATES)
            page.route("**/model.js", add_counting)
            page.goto(broker.http_url, timeout=PATIENCE * 1000)
            # The first queue has one more message than the others from the beginning, so that the graph's layout stays.
            broker.publish(b"x", "queue 0")
            shows(page, count + 1)
            expect(page.locator("#queue-pages")).to_contain_text(f"{count} queues")
            expect(page.locator("#producer-pages")).to_contain_text(f"{count} producers")
            page.get_by_role("button", name="queue 0", exact=True).click()
            expect(page.get_by_role("heading", name="Queue queue 0")).to_be_visible()
            page.evaluate("() => { window.writes.length = window.told.length = 0; }")
            # Each queue gets a new message, each row of the page changes, and the first queue turns ON.
            for number in range(count):
                broker.publish(b"x", f"queue {number}")
            broker.publish(b"x", "queue 0")
            broker.publish(b"x", "queue 0")
            shows(page, 2 * count + 3)
            expect(page.locator("#graph .node.held")).to_have_count(1)
            writes = page.evaluate("() => Math.max(...window.writes)")
            values = page.evaluate("() => Math.max(...window.told.map((each) => each.values))")
            # After one more message the worker counts and assembles everything again, without a new layout.
            page.evaluate("() => { window.told.length = 0; }")
            broker.publish(b"x", "queue 0")
            shows(page, 2 * count + 4)
            page.wait_for_function("() => window.told.some((each) => each.graph)")
            steps = page.evaluate(
                "() => Math.min(...window.told.filter((each) => each.graph).map((each) => each.steps))"
            )
            elements = page.evaluate("() => document.querySelectorAll('*').length")
    finally:
        context.close()
    return {"writes": writes, "values": values, "steps": steps, "elements": elements}


def test_an_update_writes_only_visible_parts_of_the_page_and_its_cost_grows_linearly_with_the_queues(
    browser: Browser,
) -> None:
    small, large = an_update(browser, SMALL), an_update(browser, LARGE)
    assert 0 < large["elements"] <= 1.2 * small["elements"]
    # The page gets and writes at most what it shows, for any number of queues in the broker.
    assert 0 < large["writes"] <= large["elements"]
    assert 0 < large["values"] <= 1.2 * small["values"]
    # With six times as many queues, the work grows at most six times. A quadratic algorithm would need 36 times.
    assert LARGE < large["steps"] <= LARGE / SMALL * small["steps"]
