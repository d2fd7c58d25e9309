from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from qflow_client.broker import Broker

HERE = Path(__file__).parent
#: Maximum seconds of any wait for a page or for the broker. The maximum is large, because a machine may be busy.
PATIENCE = 100.0

expect.set_options(timeout=PATIENCE * 1000)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.timeout(900))


# With these arguments, Chromium downloads nothing and does not look for updates.
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = os.environ.get("QFLOW_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        text = "Chromium was not found; install it, or set QFLOW_CHROMIUM to its path"
        if os.environ.get("QFLOW_REQUIRE_BROWSER") == "1":
            pytest.fail(f"{text} (QFLOW_REQUIRE_BROWSER=1 forbids to skip)", pytrace=False)
        pytest.skip(text)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker(http_port=0) as broker:
        yield broker


@pytest.fixture
def page(browser: Browser, broker: Broker) -> Iterator[Page]:
    """The console of the broker. An error on the page fails the test."""
    complaints: list[str] = []
    context = browser.new_context(viewport={"width": 1400, "height": 1000})
    page = context.new_page()
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    # The page must load everything from the broker.
    page.on("request", lambda request: complaints.append(request.url) if broker.http_url not in request.url else None)
    page.set_default_timeout(PATIENCE * 1000)
    page.goto(broker.http_url)
    yield page
    context.close()
    # The browser reports each response with status 400. A test may cause such a response on purpose.
    assert [text for text in complaints if "status of 400" not in text] == []
