"""Takes ``console-light.png`` and ``console-dark.png``: the console of a broker at work, in headless Chromium.

``python docs/images/console.py`` takes half a minute and writes the pictures beside itself. Three producers publish to
a topic exchange and to a queue directly, faster than the consumers take it, so that two queues go ON and OFF.
"""

from __future__ import annotations

import shutil
import threading
from contextlib import ExitStack
from pathlib import Path

import pika
from playwright.sync_api import sync_playwright

from qflow_client import Producer, ProducerClosed, UndeliveredMessages
from qflow_client.broker import Broker

# Exchange, routing key, capacity and messages per second of each producer; queue and messages per second of consumers.
PRODUCERS = (("shop", "order.new", 50, 500.0), ("", "orders", 15, 200.0), ("shop", "invoice.new", 5, 300.0))
CONSUMERS = (("orders", 250.0), ("invoices", 280.0), ("audit", 2000.0))
SECONDS = 25


def produce(producer: Producer) -> None:
    """Publish until the producer is closed."""
    try:
        while True:
            producer.send(b"x" * 100)
    except ProducerClosed:
        pass


def consume(url: str, queue: str, rate: float, over: threading.Event) -> None:
    """Take messages from a queue until it is over."""
    connection = pika.BlockingConnection(pika.URLParameters(url))
    channel = connection.channel()
    channel.basic_qos(prefetch_count=20)
    for method, _, _ in channel.consume(queue, inactivity_timeout=0.1):
        if over.is_set():
            break
        if method is not None and method.delivery_tag is not None:
            channel.basic_ack(method.delivery_tag)
            over.wait(1 / rate)
    connection.close()


def main() -> None:
    """Run the broker and take the pictures."""
    folder = Path(__file__).parent
    over = threading.Event()
    with Broker(http_port=0) as broker, ExitStack() as stack:
        broker.declare_exchange("shop", "topic")
        for queue, stop, resume, key in (
            ("orders", 1000, 300, "order.*"),
            ("invoices", 200, 100, "invoice.*"),
            ("audit", 5000, 4000, "#"),
        ):
            broker.declare_queue(queue, arguments={"qpid.flow_stop_count": stop, "qpid.flow_resume_count": resume})
            broker.bind("shop", queue, key)
        threads = [threading.Thread(target=consume, args=(broker.url, *each, over)) for each in CONSUMERS]
        producers = []
        for exchange, key, capacity, rate in PRODUCERS:
            producers.append(
                Producer(broker.url, exchange=exchange, routing_key=key, capacity=capacity, rate=rate, mandatory=False)
            )
            threads.append(threading.Thread(target=produce, args=(producers[-1],)))
        for thread in threads:
            thread.start()
        playwright = stack.enter_context(sync_playwright())
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"],
        )
        page = browser.new_page(viewport={"width": 1240, "height": 1000})
        page.goto(broker.http_url)
        page.get_by_role("button", name="orders").click()
        page.wait_for_timeout(SECONDS * 1000)
        # Taken at a moment at which somebody is held.
        broker.wait_until(lambda broker: broker.queue("orders").flow_stopped and broker.queue("orders").depth > 500, 60)
        page.wait_for_timeout(1000)
        for scheme in ("light", "dark"):
            page.get_by_label("Theme").select_option(scheme)
            # Two looks, so that everything is drawn anew.
            page.wait_for_timeout(1000)
            page.screenshot(path=folder / f"console-{scheme}.png", full_page=True)
        browser.close()
        over.set()
        for queue_snapshot in broker.queues():
            broker.delete_queue(queue_snapshot.name)
        for producer in producers:
            try:
                producer.close(timeout=1)
            except UndeliveredMessages:
                pass
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
