from __future__ import annotations

import io
import logging
import threading
from contextlib import AbstractContextManager
from unittest.mock import patch

import pytest
from rich.console import Console

from qflow_client.cli import warned
from qflow_client.cli.warned import warnings_shown

LOGGER = logging.getLogger("qflow_client.broker.some")


@pytest.fixture(autouse=True)
def _the_thread_has_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of the block, let the thread that shows the warnings have more time than it needs."""
    monkeypatch.setattr(warned, "_AT_EXIT", 20.0)


def without_handlers() -> AbstractContextManager[object]:
    """Remove pytest's handlers, because they do not mean that the user wants a log."""
    return patch.object(logging.getLogger(), "handlers", [])


def shown() -> str:
    file = io.StringIO()
    with warnings_shown("qflow_client.broker", Console(file=file, width=40)):
        LOGGER.info("not this")
        LOGGER.warning("queue '%s': [red]%s[/red]", "\x1b[2J\x07\u202e", "x" * 60)
        LOGGER.error("line\nand line")
    LOGGER.warning("nor this")
    return file.getvalue()


def test_the_command_line_shows_warnings_unshortened_and_without_terminal_control_characters() -> None:
    with without_handlers():
        lines = shown().splitlines()
    assert lines == [
        f"qflow: warning: queue '\\x1b[2J\\x07\\u202e': [red]{'x' * 60}[/red]",
        "qflow: error: line",
        "and line",
    ]


def test_the_command_line_does_not_show_a_warning_that_a_log_handler_already_shows() -> None:
    with patch.object(logging.getLogger(), "handlers", [logging.NullHandler()]):
        assert shown() == ""


def test_E9_a_terminal_that_accepts_no_output_does_not_block_the_program() -> None:
    takes = threading.Event()

    class Stuck(io.StringIO):
        def write(self, text: str) -> int:
            takes.wait()
            return super().write(text)

    file = Stuck()
    with without_handlers(), warnings_shown("qflow_client.broker", Console(file=file)):
        for number in range(5000):
            LOGGER.warning("%d", number)
        takes.set()
    lines = file.getvalue().splitlines()
    assert lines[0] == "qflow: warning: 0"
    assert len(lines) <= 1002
