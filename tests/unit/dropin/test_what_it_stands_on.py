"""Internals of pika that the drop-in depends on, as found in 1.3.2, 1.4.4 and 1.5.0rc1."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pika
import pytest
from pika.adapters import blocking_connection as blocking
from pika.adapters.base_connection import BaseConnection
from pika.adapters.utils.io_services_utils import _AsyncTransportBase

PRIVATE = {
    pika.channel.Channel: {"_send_method": ["self", "method", "content"], "_raise_if_not_open": ["self"]},
    pika.connection.Connection: {
        "_create_channel": ["self", "channel_number", "on_open_callback"],
        "_init_connection_state": ["self"],
        "_output_marshaled_frames": ["self", "marshaled_frames"],
        "_process_frame": ["self", "frame_value"],
        "_terminate_stream": ["self", "error"],
        "_adapter_call_later": ["self", "delay", "callback"],
        "_adapter_add_callback_threadsafe": ["self", "callback"],
    },
    BaseConnection: {
        "_start_connection_workflow": ["connection_configs", "connection_factory", "nbio", "workflow", "on_done"]
    },
    blocking.BlockingConnection: {"_flush_output": ["self", "waiters"], "_cleanup": ["self"]},
    blocking.BlockingChannel: {
        "_add_pending_event": ["self", "evt"],
        "_on_puback_message_returned": ["self", "channel", "method", "properties", "body"],
    },
    _AsyncTransportBase: {"get_write_buffer_size": ["self"]},
}


if find_spec("pika.adapters.thread_safe_connection"):
    from pika.adapters import thread_safe_connection

    PRIVATE[thread_safe_connection.Connection] = {
        "_is_pool_worker_thread": ["self"],
        "_on_connection_open": ["self", "_connection"],
    }


@pytest.mark.parametrize(
    ("owner", "name"), [(owner, name) for owner, names in PRIVATE.items() for name in names], ids=lambda each: str(each)
)
def test_each_private_method_of_pika_that_the_drop_in_uses_has_the_same_parameters(owner: type, name: str) -> None:
    assert list(inspect.signature(getattr(owner, name)).parameters) == PRIVATE[owner][name]


@pytest.mark.parametrize(
    ("owner", "names"),
    [
        (pika.connection.Connection, ["frames_received"]),
        (BaseConnection, ["_transport"]),
        (blocking.BlockingConnection, ["_impl", "_closed_result"]),
        (
            blocking.BlockingChannel,
            ["_impl", "_connection", "_message_confirmation_result"],
        ),
    ],
)
def test_each_private_attribute_of_pika_that_the_drop_in_uses_exists(owner: Any, names: list[str]) -> None:
    source = inspect.getsource(owner)
    for name in names:
        assert f"self.{name}" in source, name


def test_each_private_attribute_of_the_pika_thread_safe_adapter_that_the_drop_in_uses_exists() -> None:
    adapter = pytest.importorskip("pika.adapters.thread_safe_connection")
    assert "self._channel = " in inspect.getsource(adapter.Channel)
    assert "self._work_queue_put_timeout = " in inspect.getsource(adapter.Connection)


def test_the_pika_class_for_stored_answers_has_the_methods_that_the_drop_in_replaces() -> None:
    result = blocking._CallbackResult(blocking.BlockingChannel._OnMessageConfirmationReportArgs)  # type: ignore[attr-defined]
    for name in "set_value_once", "reset", "is_ready":
        assert callable(getattr(result, name))


def test_importing_the_drop_in_for_pika_changes_no_attribute_of_pika() -> None:
    program = (
        "import pika, pika.adapters.asyncio_connection\n"
        "def seen(): return {(k, n): v for k in (pika, pika.channel.Channel, pika.connection.Connection,"
        " pika.BlockingConnection, pika.SelectConnection) for n, v in vars(k).items()}\n"
        "before = seen()\n"
        "import qflow_client.pika\n"
        "assert before == seen()"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
