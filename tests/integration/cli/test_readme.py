from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from qflow_client.broker import Broker

README = Path(__file__).parents[3] / "README.md"


PROGRAMS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
URL = "amqp://guest:guest@localhost:5672/%2F"


def run(program: str, broker: Broker) -> dict[str, Any]:
    """Run a program, and return the names that it has defined."""
    names: dict[str, Any] = {}
    exec(compile(program.replace(URL, broker.url), str(README), "exec"), names)
    return names


@pytest.mark.parametrize("program", PROGRAMS[:2], ids=["threads", "asyncio"])
@pytest.mark.parametrize("is_there", [False, True], ids=["empty broker", "queue with thresholds"])
def test_the_threaded_and_the_asyncio_program_of_the_readme_publish_a_message(
    program: str, is_there: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    assert URL in program
    with Broker() as broker:
        if is_there:
            # The same queue as with `qflow broker --queue orders --flow-stop-count 100`.
            broker.declare_queue("orders", durable=True, arguments={"qpid.flow_stop_count": 100})
        run(program, broker)
        assert "confirmed\n" in capfd.readouterr().out
        assert [message.body for message in broker.messages("orders")] == [b"..."]


def test_the_test_shown_in_the_readme_passes() -> None:
    (program,) = PROGRAMS[2:]
    with Broker() as broker:
        run(program, broker)["test_my_producer_gives_up_in_time"](broker)


def test_the_links_of_the_readme_lead_to_existing_files() -> None:
    links = re.findall(r"\]\(([^)#]+)", README.read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if not (README.parent / link).exists()] == []
