from __future__ import annotations

import re

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Route, expect

from qflow_client import Producer
from qflow_client.broker import Broker, ThresholdsSnapshot
from qflow_client.testing.node import free_port
from tests.browser.conftest import PATIENCE
from tests.integration.producer.tools import Stopwatch

# Playwright's synchronous interface runs an event loop beneath the test.
pytestmark = pytest.mark.filterwarnings("ignore:a Producer that waits blocks the event loop:RuntimeWarning")

ORDERS = {"qpid.flow_stop_count": 10, "qpid.flow_resume_count": 5}
ON = "253,231,229"
# Return the share of the chart's pixels that have a colour.
_SHARE = """(colour => {
    const canvas = document.querySelector("#chart canvas");
    if (canvas === null) return 0;
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    let found = 0;
    for (let at = 0; at < data.length; at += 4) found += `${data[at]},${data[at + 1]},${data[at + 2]}` === colour;
    return found / (data.length / 4);
})"""
# Return whether the small chart of the first row contains a colour. The worker draws it, so the page must copy it.
_SPARK_HAS = """(colour => {
    const sparks = document.querySelector("#sparks");
    if (!sparks.width || !sparks.height) return false;
    const copy = new OffscreenCanvas(sparks.width, sparks.height).getContext("2d");
    copy.drawImage(sparks, 0, 0);
    const { data } = copy.getImageData(0, 0, sparks.width, 64);
    for (let at = 0; at < data.length; at += 4) {
        if (`${data[at]},${data[at + 1]},${data[at + 2]},${data[at + 3]}` === `${colour},255`) return true;
    }
    return false;
})"""
HELD = re.compile(r"\bheld\b")
#: Number of rows of a table. A window of 600 pixels that is at the top does not show them. Each row needs one update.
ROWS = 8


def test_F5_the_graph_and_the_charts_show_when_a_queue_turns_ON_and_OFF(page: Page, broker: Broker) -> None:
    broker.declare_queue("orders", arguments=ORDERS)
    with Producer(broker.url, routing_key="orders", capacity=50) as producer:
        for _ in range(11):
            producer.send(b"12345")
        row = page.get_by_role("row").filter(has=page.get_by_role("button", name="orders"))
        expect(row.get_by_role("cell").nth(0)).to_have_text("ON")
        expect(row.get_by_role("cell").nth(1)).to_have_text("11")
        node = page.locator("#graph .node").filter(has_text="orders").last
        expect(page.locator("#graph .node.held")).to_have_count(2)
        expect(page.locator("#graph .edge.held")).to_have_count(2)
        expect(node).to_have_class(HELD)
        expect(page.locator("#graph-words")).to_have_text("orders is ON and blocks (flows) 1 producer.")
        page.wait_for_function(f"on => {_SPARK_HAS}(on)", arg=ON)
        row.get_by_role("button").click()
        expect(page.locator("#detail-words")).to_contain_text("ON at 11 messages, 55 bytes, ON above 10, OFF below 5")
        # The chart has a different background while the queue is ON.
        page.wait_for_function(f"on => {_SHARE}(on) > 0.5", arg=ON)
        broker.purge("orders")
        expect(row.get_by_role("cell").nth(0)).to_have_text("OFF")
        expect(page.locator("#graph .held")).to_have_count(0)
        expect(page.locator("#announcer")).to_have_text("queue orders is OFF at 0 messages")
        # The queue must be OFF for as long as all earlier steps took, because the chart shows the whole time.
        page.wait_for_function(f"on => {_SHARE}(on) < 0.4", arg=ON, timeout=4 * PATIENCE * 1000)
        producer.flush(PATIENCE)


def test_D5_the_page_stops_all_producers_within_a_second_and_starts_them_again(page: Page, broker: Broker) -> None:
    broker.declare_queue("orders")
    with Producer(broker.url, routing_key="orders") as one, Producer(broker.url, routing_key="orders") as two:
        events = [producer.flow_events() for producer in (one, two)]
        for producer in (one, two):
            producer.send(b"x").result(PATIENCE)
        rows = page.locator("#producer-rows tr")
        expect(rows).to_have_count(2)
        stop = page.get_by_role("button", name="Stop all producers")
        stop.click()
        # Do not measure the time of the page, because it depends on the machine.
        broker.wait_until(lambda broker: broker.producers_stopped, PATIENCE)
        with Stopwatch() as watch:
            for each in events:
                assert next(each).holds[0].kind == "channel_flow"
        assert watch.kept(0)
        for row in rows.all():
            expect(row.get_by_role("cell").nth(1)).to_have_text("operator")
        expect(stop).to_have_attribute("aria-pressed", "true")
        expect(page.locator("#graph .node.operator")).to_have_count(1)
        page.get_by_role("button", name="Start all producers").click()
        for producer in (one, two):
            producer.send(b"y").result(PATIENCE)
        expect(stop).to_have_attribute("aria-pressed", "false")
        name = broker.producers()[0].name
        page.get_by_role("button", name=f"Stop producer producer, {name}").click()
        broker.wait_until(
            lambda broker: [producer.flowed for producer in broker.producers()] == [True, False], PATIENCE
        )
        page.get_by_role("button", name=f"Start producer producer, {name}").click()
        broker.wait_until(lambda broker: not any(producer.flowed for producer in broker.producers()), PATIENCE)


def test_D4_thresholds_can_be_edited_on_the_page_and_invalid_values_are_marked(page: Page, broker: Broker) -> None:
    broker.declare_queue("orders", arguments=ORDERS)
    page.get_by_role("button", name="orders").click()
    messages = page.get_by_role("group", name="Messages")
    stop, resume = messages.get_by_label("ON above"), messages.get_by_label("OFF below")
    expect(stop).to_have_value("10")
    stop.fill("3")
    page.get_by_role("button", name="Set thresholds").click()
    expect(page.locator("#thresholds-answer")).to_contain_text("flow_stop_count=3 and flow_resume_count=5")
    expect(stop).to_have_attribute("aria-invalid", "true")
    expect(stop).to_be_focused()
    resume.fill("")
    page.get_by_role("button", name="Set thresholds").click()
    expect(page.locator("#thresholds-answer")).to_have_text("The thresholds are set.")
    expect(resume).to_have_value("2")
    expect(stop).not_to_have_attribute("aria-invalid", "true")
    assert broker.queue("orders").thresholds == ThresholdsSnapshot(3, 2)
    stop.fill("0")
    page.get_by_role("group", name="Capacity").get_by_label("ON above").fill("100")
    page.get_by_role("button", name="Set thresholds").click()
    broker.wait_until(
        lambda broker: broker.queue("orders").thresholds == ThresholdsSnapshot(0, 0, 0, 0, 100, 100), PATIENCE
    )
    # Changes that another user makes at the same time stay.
    stop.fill("20")
    broker.set_thresholds("orders", capacity=50, flow_resume_capacity=None)
    page.get_by_role("button", name="Set thresholds").click()
    broker.wait_until(
        lambda broker: broker.queue("orders").thresholds == ThresholdsSnapshot(20, 17, 0, 0, 50, 50), PATIENCE
    )
    # Text that the user types before the answer arrives also stays.
    expect(stop).to_have_value("20")
    with page.expect_request("**/thresholds") as request:
        held: list[Route] = []
        page.route("**/thresholds", lambda route: held.append(route))
        stop.fill("30")
        page.get_by_role("button", name="Set thresholds").click()
    assert request.value.post_data_json == {"flowStopCount": 30}
    expect(page.get_by_role("button", name="Set thresholds")).to_be_disabled()
    stop.fill("40")
    held[0].continue_()
    expect(page.get_by_role("button", name="Set thresholds")).to_be_enabled()
    expect(stop).to_have_value("40")
    page.unroute("**/thresholds")
    page.get_by_role("button", name="Set thresholds").click()
    broker.wait_until(lambda broker: broker.queue("orders").thresholds.flow_stop_count == 40, PATIENCE)
    broker.publish(b"x", "orders")
    page.get_by_role("button", name="Purge").click()
    broker.wait_until(lambda broker: not broker.queue("orders").depth, PATIENCE)


def test_each_small_chart_is_in_the_row_of_its_queue_and_only_names_are_cut_off(page: Page, broker: Broker) -> None:
    broker.declare_queue("q" * 200)
    rows, sparks = page.locator("#queue-rows tr"), page.locator("#sparks")
    for count in (1, 4):
        expect(rows).to_have_count(count)
        # The charts are as high as the rows, and within the last column.
        page.wait_for_function(
            """() => {
                const place = (name) => document.querySelector(name).getBoundingClientRect();
                const [sparks, rows] = [place("#sparks"), place("#queue-rows")];
                const cell = place("#queue-rows td:last-child");
                return Math.abs(sparks.top - rows.top) < 2 && Math.abs(sparks.bottom - rows.bottom) < 2
                    && sparks.left >= cell.left - 1 && sparks.right <= rows.right + 1;
            }"""
        )
        for number in range(3 if count == 1 else 0):
            broker.declare_queue(f"queue {number}")
    header, depth = rows.first.locator("th"), rows.first.get_by_role("cell").nth(1).locator(".box")
    assert header.evaluate("each => each.scrollWidth > each.clientWidth")
    assert depth.evaluate("each => each.scrollWidth <= each.clientWidth")
    assert sparks.get_attribute("aria-hidden") == "true"
    # The text takes as many lines as it needs.
    page.set_viewport_size({"width": 320, "height": 800})
    for number in range(3):
        broker.set_thresholds(f"queue {number}", flow_stop_count=1)
        broker.publish(b"x", f"queue {number}")
        broker.publish(b"x", f"queue {number}")
    words = page.locator("#graph-words")
    expect(words).to_contain_text("queue 2 is ON")
    page.wait_for_function(
        """() => {
            const words = document.querySelector("#graph-words");
            return words.clientHeight > 40 && Math.abs(words.clientHeight - words.firstElementChild.offsetHeight) <= 1;
        }"""
    )


def test_rows_outside_the_window_are_updated_one_at_a_time_and_visible_rows_together(
    page: Page, broker: Broker
) -> None:
    page.set_viewport_size({"width": 1400, "height": 600})
    for number in range(ROWS):
        broker.declare_queue(f"queue {number:02}")
    rows = page.locator("#queue-rows tr")
    expect(rows).to_have_count(ROWS)
    expect(rows.first).not_to_be_in_viewport()
    # Count the rows that are written together. When the first row is reported as invisible, the page knows all of them.
    page.evaluate(
        """() => new Promise((resolve) => {
            const rows = document.querySelector("#queue-rows");
            new IntersectionObserver(([first]) => {
                if (!first.isIntersecting) resolve();
            }).observe(rows.firstElementChild);
            window.most = 0;
            new MutationObserver((all) => {
                const written = new Set(all.map(({ target }) => target.parentElement.closest("tr")));
                window.most = Math.max(window.most, written.size);
            }).observe(rows, { subtree: true, characterData: true });
        })"""
    )
    for number in range(ROWS):
        broker.publish(b"x", f"queue {number:02}")
    for row in rows.all():
        expect(row.get_by_role("cell").nth(1)).to_have_text("1")
    assert page.evaluate("window.most") == 1
    # Get the text that a screen reader reads.
    tree = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    read = [each["name"]["value"] for each in tree if each["role"]["value"] in ("rowheader", "cell")]
    last = f"queue {ROWS - 1:02}"
    assert read[read.index(last) :][:4] == [last, "OFF", "1", "1"]
    rows.last.scroll_into_view_if_needed()
    for number in range(ROWS):
        broker.publish(b"x", f"queue {number:02}")
    page.wait_for_function("() => window.most > 1")
    for row in rows.all():
        expect(row.get_by_role("cell").nth(1)).to_have_text("2")


def test_a_graph_node_shows_current_values_when_it_is_scrolled_into_view(page: Page, broker: Broker) -> None:
    for number in range(20):
        broker.declare_queue(f"queue {number:02}")
        # A queue is in the graph after a first publish to it.
        broker.publish(b"x", f"queue {number:02}")
    with Producer(broker.url, routing_key="queue 00") as producer:
        producer.send(b"x").result(20)
        nodes = page.locator("#graph .node").filter(has_text="queue")
        expect(nodes).to_have_count(20)
        by_place = "nodes => nodes.sort((a, b) => a.getBoundingClientRect().y - b.getBoundingClientRect().y)"
        last = page.locator("#graph .node").filter(
            has_text=nodes.evaluate_all(f"{by_place}.at(-1).children[2].textContent")
        )
        name = last.locator("text").first.text_content() or ""
        expect(last).not_to_be_in_viewport()
        for _ in range(4):
            broker.publish(b"x", name)
        last.scroll_into_view_if_needed()
        expect(last).to_contain_text("5 messages")


def test_the_thresholds_of_a_queue_can_be_set_with_the_keyboard_alone(page: Page, broker: Broker) -> None:
    broker.declare_queue("orders", arguments=ORDERS)
    expect(page.get_by_role("button", name="orders")).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the queues")).to_be_focused()
    page.keyboard.press("Enter")
    for _ in range(10):
        page.keyboard.press("Tab")
        if page.get_by_role("button", name="orders").evaluate("each => each === document.activeElement"):
            break
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Queue orders")).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.get_by_role("group", name="Messages").get_by_label("ON above")).to_be_focused()
    page.keyboard.press("Control+A")
    page.keyboard.type("20")
    page.keyboard.press("Enter")
    broker.wait_until(lambda broker: broker.queue("orders").thresholds.flow_stop_count == 20, PATIENCE)


def test_keys_replace_a_threshold_that_was_updated_while_its_field_had_the_focus(page: Page, broker: Broker) -> None:
    broker.declare_queue("orders", arguments=ORDERS)
    page.get_by_role("button", name="orders").click()
    field = page.get_by_role("group", name="Messages").get_by_label("ON above")
    expect(field).to_have_value("10")
    field.focus()
    page.keyboard.press("Control+A")
    broker.set_thresholds("orders", flow_stop_count=30)
    expect(field).to_have_value("30")
    page.keyboard.type("20")
    expect(field).to_have_value("20")


def test_the_list_of_queues_can_be_filtered_sorted_and_paged(page: Page, broker: Broker) -> None:
    for number in range(60):
        broker.declare_queue(f"queue {number:02}", arguments=ORDERS)
    for _ in range(11):
        broker.publish(b"x", "queue 42")
    rows = page.locator("#queue-rows tr")
    pages = page.get_by_role("navigation", name="Pages of queues")
    expect(pages).to_contain_text("page 1 of 4, 60 queues")
    expect(rows).to_have_count(15)
    pages.get_by_role("button", name="Next page").click()
    expect(rows.first).to_contain_text("queue 15")
    queues = page.get_by_role("search", name="Queues")
    queues.get_by_label("Name contains").fill("QUEUE 1")
    expect(pages).to_contain_text("page 1 of 1, 10 of 60 queues")
    queues.get_by_label("Name contains").fill("")
    queues.get_by_label("Sort by").select_option("depth")
    expect(rows.first).to_contain_text("queue 42")
    queues.get_by_label("only those that are ON").check()
    expect(rows).to_have_count(1)
    # The page says how many queues the graph does not show.
    expect(page.locator("#graph-words")).to_contain_text("Not drawn: 36 more queues.")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_accessibility_problem_on_the_page(page: Page, broker: Broker, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
    broker.declare_queue("orders", arguments=ORDERS)
    broker.declare_queue("other")
    with Producer(broker.url, routing_key="orders") as one, Producer(broker.url, routing_key="other") as two:
        for _ in range(11):
            one.send(b"x")
        two.send(b"x")
        broker.wait_until(lambda broker: broker.queue("orders").flow_stopped, PATIENCE)
        broker.flow(active=False, channel=broker.producers()[1].name)
        page.get_by_role("button", name="orders").click()
        expect(page.locator("#graph .node.operator")).to_have_count(1)
        expect(page.locator("#graph .node.held")).to_have_count(2)
        found = Axe().run(page)
        assert found.violations_count == 0, found.generate_report()
        assert len(found.response["passes"]) > 20
        broker.flow(active=True)
        broker.purge("orders")


def test_the_user_can_choose_a_theme_and_the_page_keeps_the_choice(page: Page) -> None:
    def back() -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    page.emulate_media(color_scheme="light")
    assert back() == "rgb(255, 255, 255)"
    page.get_by_label("Theme").select_option("dark")
    assert back() == "rgb(13, 17, 23)"
    page.reload()
    assert back() == "rgb(13, 17, 23)"
    page.emulate_media(color_scheme="dark")
    page.get_by_label("Theme").select_option("light")
    assert back() == "rgb(255, 255, 255)"
    page.get_by_label("Theme").select_option("auto")
    assert back() == "rgb(13, 17, 23)"


def test_the_page_asks_for_the_token_until_the_user_enters_the_correct_token(browser: Browser) -> None:
    with Broker(http_port=0, http_token="correct-horse") as broker:
        broker.declare_queue("orders")
        page = browser.new_page()
        page.goto(broker.http_url)
        dialog = page.get_by_role("dialog", name="Token")
        assert Axe().run(page).violations_count == 0
        for token in ("wrong-horse", "correct-horse"):
            expect(dialog).to_be_visible()
            dialog.get_by_label("Token").fill(token)
            dialog.get_by_role("button").click()
        expect(page.get_by_role("button", name="orders")).to_be_visible()
        expect(dialog).to_be_hidden()
        page.get_by_role("button", name="Stop all producers").click()
        broker.wait_until(lambda broker: broker.producers_stopped, PATIENCE)
        # The page keeps the token while the tab is open.
        page.reload()
        expect(page.get_by_role("button", name="orders")).to_be_visible()
        page.context.close()


def test_the_page_reports_that_the_broker_has_stopped_and_reconnects_when_the_broker_runs_again(
    browser: Browser,
) -> None:
    context = browser.new_context()
    page = context.new_page()
    # The system gives this port to no outgoing connection while the broker does not listen on it.
    port = free_port(set())
    with Broker(http_port=port) as broker:
        broker.declare_queue("before")
        page.goto(broker.http_url)
        expect(page.get_by_role("button", name="before")).to_be_visible()
    expect(page.locator("#connection")).to_contain_text("not connected: ")
    with Broker(http_port=port) as broker:
        broker.declare_queue("after")
        expect(page.get_by_role("button", name="after")).to_be_visible()
        expect(page.get_by_role("button", name="before")).to_have_count(0)
        expect(page.locator("#connection")).to_have_text(f"connected to 127.0.0.1:{port}")
        context.close()
