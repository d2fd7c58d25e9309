"""A log handler of the application, which may be slow, stuck or broken."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from qflow_client import logs
from qflow_client.core.reporting import is_logged, log_entry
from qflow_client.guard import serve
from tests.interrupting import pressed_in

from .support import make

#: A function that adds a log handler: the argument is called with every record.
Handle = Callable[[Callable[[logging.LogRecord], object]], None]


@pytest.fixture
def handle() -> Iterator[Handle]:
    """Handle every record with a function."""
    handlers: list[logging.Handler] = []

    def add(function: Callable[[logging.LogRecord], object]) -> None:
        handler = logging.Handler()
        handler.handle = function  # type: ignore[assignment,method-assign]
        logs.logger.addHandler(handler)
        handlers.append(handler)

    yield add
    assert logs.flush_logs(20)
    for handler in handlers:
        logs.logger.removeHandler(handler)


def test_log_records_are_handled_in_order_on_a_separate_thread(handle: Handle) -> None:
    seen: list[tuple[str, str, str]] = []
    handle(lambda record: seen.append((record.levelname, record.getMessage(), threading.current_thread().name)))
    logs.write_log([log_entry(logging.WARNING, "one of %d", 2), log_entry(logging.INFO, "two")])
    assert logs.flush_logs(20)
    assert seen == [("WARNING", "one of 2", "qflow-log"), ("INFO", "two", "qflow-log")]


def test_a_log_record_names_the_thread_that_logged_it(handle: Handle) -> None:
    seen: list[logging.LogRecord] = []
    handle(seen.append)
    error = ValueError("a mistake")
    logs.log(logging.ERROR, "it failed", error=error)
    assert logs.flush_logs(20)
    (record,) = seen
    assert (record.name, record.threadName) == ("qflow_client", threading.current_thread().name)
    assert record.exc_info is not None
    assert record.exc_info[1] is error


def test_a_filter_of_the_application_sees_a_librarys_record_of_an_io_thread_once_on_the_logging_thread() -> None:
    seen: list[str] = []
    logger = logging.getLogger("qflow_test_library.connection")

    def see(_record: logging.LogRecord) -> bool:
        seen.append(threading.current_thread().name)
        return True

    logger.addFilter(see)
    for _ in range(2):
        logs.take_over("qflow_test_library")
    serve(lambda: logger.warning("lost"))
    assert logs.flush_logs(20)
    assert seen == ["qflow-log"]
    logger.warning("by the application")
    assert seen == ["qflow-log", threading.current_thread().name]


@pytest.mark.parametrize("where", ["a skin", "a protocol"])
def test_logging_from_the_library_never_waits_for_the_lock_of_the_logging_module(where: str) -> None:
    log = logs.log if where == "a skin" else make().reports.log
    thread = threading.Thread(target=log, args=(logging.DEBUG, "here"))
    logger = logs.logger.manager.root
    # As while another thread sets a level: the loggers' caches are empty.
    with logging._lock:  # type: ignore[attr-defined]  # private, and the one lock that matters
        logger.setLevel(logger.level)
        thread.start()
        thread.join(20)
        assert not thread.is_alive()


@pytest.mark.parametrize("level", [logging.DEBUG, logging.INFO, logging.WARNING])
@pytest.mark.parametrize("least", [logging.NOTSET, logging.INFO, logging.CRITICAL])
@pytest.mark.parametrize("disabled", [logging.NOTSET, logging.INFO, logging.CRITICAL])
def test_an_entry_is_logged_exactly_if_the_logging_configuration_enables_its_level(
    level: int, least: int, disabled: int
) -> None:
    logger = logs.logger
    before = logger.level
    try:
        logger.setLevel(least)
        logging.disable(disabled)
        assert is_logged(level) == logger.isEnabledFor(level)
    finally:
        logging.disable(logging.NOTSET)
        logger.setLevel(before)


def test_a_log_record_names_the_file_function_and_line_that_logged_it(handle: Handle) -> None:
    seen: list[logging.LogRecord] = []
    handle(seen.append)
    reports = make().reports
    reports.logs.clear()
    here = sys._getframe()
    line = here.f_lineno + 2
    for log in (logs.log, reports.log):
        log(logging.WARNING, "here")
    logs.write_log(reports.logs)
    assert logs.flush_logs(20)
    assert [(each.pathname, each.funcName, each.lineno) for each in seen] == [(__file__, here.f_code.co_name, line)] * 2


def test_log_records_below_the_enabled_level_are_not_created(handle: Handle, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "qflow_client")
    seen: list[logging.LogRecord] = []
    handle(seen.append)
    logs.log(logging.INFO, "quiet")
    assert logs.flush_logs(20)
    assert seen == []


def test_if_a_log_handler_is_stuck_waiting_records_are_bounded_and_further_records_are_counted(
    handle: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_MOST", 5)
    stuck, go_on = threading.Event(), threading.Event()
    seen: list[str] = []

    def handle_slowly(record: logging.LogRecord) -> None:
        stuck.set()
        assert go_on.wait(20)
        seen.append(record.getMessage())

    handle(handle_slowly)
    logs.log(logging.INFO, "first")
    assert stuck.wait(20)
    for number in range(8):
        logs.log(logging.INFO, "%d", number)
    assert not logs.flush_logs(0.0)
    go_on.set()
    assert logs.flush_logs(20)
    dropped = "3 log records were dropped, because the log handlers are too slow"
    assert seen == ["first", dropped, *map(str, range(5))]


def test_ctrl_c_while_the_logging_thread_starts_loses_no_later_record(
    handle: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_writer", logs._Writer())
    seen: list[str] = []
    handle(lambda record: seen.append(record.getMessage()))
    with pressed_in(threading.Thread, "start"):
        logs.log(logging.INFO, "first")
    logs.log(logging.INFO, "second")
    assert logs._writer._thread is not None
    assert logs.flush_logs(20)
    assert seen == ["first", "second"]


def test_a_log_handler_that_flushes_the_logs_does_not_wait_for_itself(
    handle: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Quick(threading.Thread):
        def start(self) -> None:
            super().start()
            # The first record is handled before its maker continues.
            assert handled.wait(20)

    def flush(_record: logging.LogRecord) -> None:
        flushed.append(logs.flush_logs(20))
        handled.set()

    monkeypatch.setattr(threading, "Thread", Quick)
    monkeypatch.setattr(logs, "_writer", logs._Writer())
    flushed: list[bool] = []
    handled = threading.Event()
    handle(flush)
    logs.log(logging.INFO, "x")
    assert logs.flush_logs(20)
    assert flushed == [False]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork, which this system does not have")
def test_a_forked_child_process_logs_its_own_records(handle: Handle) -> None:
    reading, writing = os.pipe()
    handle(lambda record: os.write(writing, record.getMessage().encode()))
    logs.log(logging.INFO, "parent ")
    assert logs.flush_logs(20)
    child = os.fork()
    if child == 0:
        logs.log(logging.INFO, "child")
        os._exit(0 if logs.flush_logs(20) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(writing)
    assert os.read(reading, 100) == b"parent child"
    os.close(reading)
