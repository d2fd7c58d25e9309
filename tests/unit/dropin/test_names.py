"""A name has the same meaning in a library and in its drop-in."""

from __future__ import annotations

import asyncio
import inspect
import re
import sys
from collections.abc import Callable, Coroutine
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import aio_pika
import aiormq
import amqp
import amqp.transport
import celery
import kombu
import kombu.connection
import pika
import pytest
from yarl import URL

import qflow_client
import qflow_client.aio_pika
import qflow_client.kombu
import qflow_client.pika
from qflow_client import SettingsError
from qflow_client.aio_pika.connection import settings_of
from qflow_client.aio_pika.flow import AIO_PIKA, AIO_PIKA_ROBUST
from qflow_client.dropin import DropIn
from qflow_client.kombu.flow import KOMBU
from qflow_client.pika.flow import PIKA
from tests.integration.parity import until_release

# The newest tested releases.
KNOWN = {
    "aio-pika": "10.2.1",
    "aiormq": "7.2.4",
    "amqp": "5.4.2",
    "celery": "5.7.0",
    "kombu": "5.7.0",
    "pika": "1.5.0rc1",
}


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(**arguments: Any) -> None:
        asyncio.run(test(**arguments))

    return run


def parameters(*functions: Callable[..., Any]) -> set[str]:
    return {name for function in functions for name in inspect.signature(function).parameters}


def quoted(pattern: str, *sources: Any) -> set[str]:
    """Return the names that a library's code looks up as text, as in ``query.get("name")``."""
    found = {name for source in sources for name in re.findall(pattern, inspect.getsource(source))}
    assert found, f"nothing is looked up by {pattern} any more"
    return found


def of_pika() -> set[str]:
    """Return all names of pika's connection parameters, as keywords, as attributes and in a URL's query."""
    setters = {name for name in dir(pika.URLParameters) if name.startswith("_set_url_")}
    return (
        parameters(pika.ConnectionParameters)
        | {name for name in dir(pika.URLParameters) if not name.startswith("_")}
        | {name.removeprefix("_set_url_") for name in setters}
    )


def of_aio_pika() -> set[str]:
    """Return all names that aio-pika and aiormq accept, as keywords and in a URL's query."""
    kinds = aio_pika.Connection, aio_pika.RobustConnection
    names = parameters(aio_pika.connect, aio_pika.connect_robust, aio_pika.connection.make_url, aiormq.connect, *kinds)
    names |= {parameter.name for kind in kinds for parameter in kind.PARAMETERS}
    names |= quoted(r"query\.get\(\s*[\"'](\w+)", aiormq.connection)
    # The first argument of all functions, also in the drop-in. As a keyword it never means the setting.
    return names - {"url"}


def of_kombu() -> set[str]:
    """Return all names of transport options, and the other names that kombu and Celery pass to the transport."""
    names = parameters(kombu.Connection, amqp.Connection, amqp.transport.TCPTransport, amqp.transport.SSLTransport)
    names |= parameters(celery.Celery.connection)
    return names | quoted(r"transport_opts\[[\"'](\w+)", kombu.connection)


LIBRARIES = pytest.mark.parametrize(
    ("drop_in", "names"),
    [(PIKA, of_pika()), (AIO_PIKA, of_aio_pika()), (KOMBU, of_kombu())],
    ids=["pika", "aio-pika", "kombu"],
)


@LIBRARIES
def test_E11_the_list_of_setting_names_that_a_library_also_uses_is_complete(drop_in: DropIn, names: set[str]) -> None:
    with until_release(**KNOWN):
        assert drop_in.theirs == drop_in.SETTINGS & names


@LIBRARIES
def test_E11_a_drop_in_accepts_every_setting_under_a_name_that_its_library_does_not_use(
    drop_in: DropIn, names: set[str]
) -> None:
    assert set(drop_in.names.values()) == drop_in.SETTINGS
    with until_release(**KNOWN):
        assert not drop_in.names.keys() & names


def test_E11_the_drop_in_passes_retry_delay_and_every_other_pika_parameter_to_pika() -> None:
    given: dict[str, Any] = {
        name: getattr(pika.ConnectionParameters(), name) for name in parameters(pika.ConnectionParameters) - {"kwargs"}
    } | {"retry_delay": 2.5, "connection_attempts": 3}
    theirs = pika.ConnectionParameters(**given)
    ours = qflow_client.pika.ConnectionParameters(**given, capacity=7)
    assert ours == theirs
    assert (ours.retry_delay, ours.flow_settings.capacity) == (2.5, 7)


@pytest.mark.parametrize("query", ["{}&capacity=7", "capacity=7&{}", "{}"])
def test_E11_the_drop_in_passes_retry_delay_and_every_other_pika_parameter_in_a_url_to_pika(query: str) -> None:
    pikas = (
        "retry_delay=2.5&connection_attempts=3&heartbeat=9&locale=de&socket_timeout=4&stack_timeout=8&frame_max=8192"
        "&channel_max=5&blocked_connection_timeout=6&client_properties=%7B%27a%27%3A+%27b+c%27%7D"
        "&tcp_options={'TCP_KEEPIDLE':+60}"
    )
    url = "amqp://user:p%40ss@host:1234/v%2Fhost?"
    theirs = pika.URLParameters(url + pikas)
    ours = qflow_client.pika.URLParameters(url + query.format(pikas))
    assert ours == theirs
    assert ours.retry_delay == 2.5
    assert ours.flow_settings.capacity == (7 if "capacity" in query else 1000)


@pytest.mark.parametrize("name", ["retry_delay", "connect_timeout"])
def test_E11_an_error_about_a_setting_with_a_special_name_in_the_drop_in_shows_that_name(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} is not a setting of a connection of pika: "):
        qflow_client.pika.ConnectionParameters(**{"qflow_retry_delay" if name == "retry_delay" else name: 1})


@pytest.mark.parametrize("kind", ["Connection", "RobustConnection"])
@in_a_loop
async def test_E11_the_drop_in_passes_name_and_every_other_aio_pika_parameter_in_a_url_to_aio_pika(kind: str) -> None:
    pikas = "name=shop&timeout=3&heartbeat=9&reconnect_interval=4&fail_fast=0&interleave=1&auth=plain"
    url = "amqp://user:p%40ss@host:1234/v%2Fhost?"
    theirs = getattr(aio_pika, kind)(URL(url + pikas))
    ours = getattr(qflow_client.aio_pika, kind)(URL(f"{url}capacity=7&{pikas}&qflow_name=till"))
    assert ours.url == theirs.url
    assert {name: ours.kwargs[name] for name in theirs.kwargs} == theirs.kwargs
    assert (ours.flow_settings.capacity, ours.flow_settings.name) == (7, "till")
    for connection in ours, theirs:
        await connection.close()


@pytest.mark.parametrize(
    ("keywords", "name"),
    [
        ({"name": "shop"}, "shop"),
        ({"name": "shop", "qflow_name": "till"}, "till"),
        ({"qflow_name": "till"}, "till"),
        ({"name": "é" * 200}, "é" * 127),
        ({"name": 7}, "7"),
        ({"name": None}, "producer"),
        ({"name": ""}, "producer"),
    ],
    ids=["theirs", "both", "ours", "long", "number", "none", "empty"],
)
@in_a_loop
async def test_E11_the_connection_name_of_aio_pika_is_the_name_in_flow_events_unless_a_setting_replaces_it(
    keywords: dict[str, Any], name: str
) -> None:
    url = aio_pika.connection.make_url("amqp://host", **keywords)
    connection = qflow_client.aio_pika.Connection(url, **keywords)
    assert connection.flow_settings.name == name
    assert connection.url.query.get("name") == aio_pika.connection.make_url("amqp://host", **keywords).query.get("name")
    await connection.close()


@in_a_loop
async def test_E11_an_invalid_value_of_the_setting_for_the_producer_name_raises_an_error() -> None:
    with pytest.raises(SettingsError, match="name="):
        qflow_client.aio_pika.Connection(URL("amqp://host"), qflow_name="é" * 200)


def test_E11_the_drop_in_passes_connect_timeout_and_every_other_transport_option_to_py_amqp() -> None:
    given: dict[str, Any] = {
        "connect_timeout": 3, "read_timeout": 4, "write_timeout": 5, "login_method": "PLAIN", "confirm_publish": True,
        "max_retries": 2, "interval_start": 0, "interval_step": 1, "interval_max": 2, "connect_retries_timeout": 6,
        "heartbeat": 9, "locale": "de", "channel_max": 5, "frame_max": 8192, "client_properties": {"a": "b"},
    }  # fmt: skip
    theirs, ours = amqp.Connection(**given), qflow_client.kombu.Connection(**given, capacity=7)
    for name in parameters(amqp.Connection):
        if name in given:
            assert getattr(ours, name, None) == getattr(theirs, name, None), name
    assert ours.connect_timeout == 3
    assert ours.flow_settings.capacity == 7
    with pytest.raises(TypeError, match="connect_timeout is not a setting of a connection of kombu: "):
        qflow_client.kombu.Connection(qflow_connect_timeout=3)


def test_a_parameter_of_aio_pika_whose_name_is_almost_a_setting_causes_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("qflow_client.settings._examined", set())
    url = URL("amqp://h/?capacity=5&rate_brust=s3cr3t-pw&name=shop&heartbeat=5&reconnect_interval=5&fail_fast=0")
    with pytest.warns(UserWarning, match="parameter rate_brust .* did you mean rate_burst") as warned:
        settings, rest, _ = settings_of(AIO_PIKA_ROBUST, url, {})
    assert len(warned) == 1
    assert (settings.capacity, rest.query["rate_brust"]) == (5, "s3cr3t-pw")
    assert "s3cr3t" not in repr(settings)


@pytest.mark.parametrize("library", [pika, aio_pika])
def test_type_checkers_find_each_module_that_a_drop_in_takes_from_its_library(library: ModuleType) -> None:
    drop_in = f"qflow_client.{library.__name__}"
    taken = {
        name.removeprefix(f"{drop_in}."): module.__name__
        for name, module in sys.modules.items()
        if name.startswith(f"{drop_in}.") and module.__name__.startswith(f"{library.__name__}.")
    }
    folder = Path(qflow_client.__file__).parent / library.__name__
    stubs = {
        ".".join(stub.relative_to(folder).with_suffix("").parts).removesuffix(".__init__"): stub.read_text()
        for stub in folder.rglob("*.pyi")
    }
    assert "exceptions" in taken
    for name, theirs in taken.items():
        # Programs do not import modules whose names start with an underscore.
        if "._" not in f".{name}":
            assert stubs[name] == f"from {theirs} import *\n", f"the stub of {drop_in}.{name}"
