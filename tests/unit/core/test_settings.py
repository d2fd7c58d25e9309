"""Settings: the sources of a value, rejected values and their errors, and values that are never shown."""

from __future__ import annotations

import copy
import pickle
import re
from dataclasses import fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from qflow_client import (
    HostOrder,
    OnBlocked,
    OnDisconnect,
    OnOutboxFull,
    OnRefused,
    OutboxSynchronous,
    ProducerSettings,
    SettingsError,
    WhenFlowed,
)
from qflow_client.settings import SettingsKeywords, hide_password

URL = "amqp://guest:guest@localhost:5672/%2F"

# For every setting except the URL, a text in a URL or the environment, and the value that it means.
TEXTS: list[tuple[str, str, Any]] = [
    ("exchange", "orders", "orders"),
    ("routing_key", "new", "new"),
    ("capacity", "5", 5),
    ("capacity_max", "50", 50),
    ("capacity_bytes", "1000", 1000),
    ("max_producer_flow_control_wait", "2.5", 2.5),
    ("when_flowed", "raise", WhenFlowed.RAISE),
    ("confirms", "no", False),
    ("mandatory", "off", False),
    ("message_ids", "0", False),
    ("rate", "12.5", 12.5),
    ("rate_burst", "3", 3),
    ("outbox", "orders.outbox", "orders.outbox"),
    ("outbox_max_bytes", "1000", 1000),
    ("outbox_max_age", "60", 60.0),
    ("outbox_full", "raise", OnOutboxFull.RAISE),
    ("outbox_synchronous", "full", OutboxSynchronous.FULL),
    ("outbox_keep_undelivered", "on", True),
    ("max_unwritten_bytes", "100", 100),
    ("max_failed_bytes", "100", 100),
    ("max_flow_events", "100", 100),
    ("flow_control_wait_notify_period", "0.5", 0.5),
    ("connect_timeout", "3", 3.0),
    ("connect_in_background", "yes", True),
    ("close_timeout", "12", 12.0),
    ("on_disconnect", "fail", OnDisconnect.FAIL),
    ("reconnect_timeout", "90", 90.0),
    ("reconnect_delay", "0.5", 0.5),
    ("reconnect_delay_max", "60", 60.0),
    ("reconnect_jitter", "0.25", 0.25),
    ("host_order", "shuffled", HostOrder.SHUFFLED),
    ("on_blocked", "failover", OnBlocked.FAILOVER),
    ("failover_delay", "2.5", 2.5),
    ("return_to_first", "60", 60.0),
    ("liveness", "2", 2.0),
    ("on_refused", "fail", OnRefused.FAIL),
    ("retry_for", "5.5", 5.5),
    ("delivery_timeout", "120", 120.0),
    ("retry_delay", "0.7", 0.7),
    ("retry_delay_max", "8", 8.0),
    ("tracing", "on", True),
    ("name", "billing", "billing"),
]
CHANGED = [pytest.param(*each, id=each[0]) for each in TEXTS]


def load(*args: Any, environ: dict[str, str] | None = None, **keywords: Any) -> ProducerSettings:
    return ProducerSettings.load(*args, environ=environ or {}, **keywords)


def default(name: str) -> Any:
    return {setting.name: setting.default for setting in fields(ProducerSettings)}[name]


def test_type_checkers_see_every_setting_with_its_type() -> None:
    settings = {field.name: field.type for field in fields(ProducerSettings) if field.metadata and field.name != "url"}
    keywords = SettingsKeywords.__annotations__
    assert list(keywords) == list(settings)
    for name, known in keywords.items():
        # A keyword may also be the text of a member of an enumeration.
        assert known.__forward_arg__.split(" | Literal")[0] == str(settings[name]).split(" | Literal")[0]


def test_E12_the_default_close_timeout_ends_before_kubernetes_kills_the_process() -> None:
    limit = ProducerSettings().close_timeout
    assert limit is not None
    # A second for the end of the connection, and some time for the rest of the program.
    assert limit <= 30.0 - 5.0


def test_the_table_of_setting_texts_in_this_test_file_contains_every_producer_setting() -> None:
    assert {each[0] for each in TEXTS} | {"url"} == {each.name for each in fields(ProducerSettings) if each.metadata}


def test_F2_the_default_rate_burst_is_the_number_of_messages_that_the_rate_allows_in_50_ms() -> None:
    assert [ProducerSettings(rate=rate).burst for rate in (None, 0.1, 20, 3000)] == [1, 1, 1, 150]
    assert ProducerSettings(rate=3000, rate_burst=1).burst == 1


def test_the_producer_settings_have_the_documented_defaults() -> None:
    settings = load()
    assert settings == ProducerSettings()
    assert settings.url == URL
    assert settings.capacity == 1000
    assert settings.max_producer_flow_control_wait == 60.0
    assert settings.when_flowed is WhenFlowed.BLOCK
    assert settings.max_unwritten_bytes == 1 << 20
    assert settings.max_failed_bytes == 1 << 24
    assert settings.max_flow_events == 10_000
    assert settings.flow_control_wait_notify_period == 5.0
    assert settings.confirms
    assert settings.mandatory is None
    assert settings.is_mandatory
    assert settings.message_ids


@pytest.mark.parametrize(("name", "text", "value"), CHANGED)
def test_a_setting_is_taken_from_the_first_source_that_has_a_value_for_it(name: str, text: str, value: Any) -> None:
    environ = {f"QFLOW_{name.upper()}": text}
    url = f"{URL}?{name}={text}"
    # Another value of the same kind.
    other: Any = None if isinstance(value, (bool, StrEnum)) else "k" if isinstance(value, str) else value + 1
    assert getattr(load(environ={}), name) == default(name)
    assert getattr(load(environ=environ), name) == value
    assert getattr(load(url), name) == value
    assert getattr(load(settings=ProducerSettings(**{name: value})), name) == value
    assert getattr(load(**{name: value}), name) == value
    if other is None:
        # One of the two values is the default. It wins if it is given.
        other = default(name)
        assert getattr(load(f"{URL}?{name}={str(other).lower()}", environ=environ), name) == other
        assert getattr(load(url, environ=environ, **{name: other}), name) == other
        assert getattr(load(settings=ProducerSettings(**{name: value}), environ={}, **{name: other}), name) == other
        return
    assert getattr(load(f"{URL}?{name}={other}", environ=environ), name) == other
    assert getattr(load(url, ProducerSettings(**{name: other}), environ=environ), name) == other
    assert getattr(load(url, ProducerSettings(**{name: value}), environ=environ, **{name: other}), name) == other


FOLLOWS: list[tuple[dict[str, Any], bool]] = [
    ({}, True),
    ({"message_ids": False}, False),
    ({"message_ids": False, "mandatory": None}, False),
    ({"message_ids": False, "mandatory": False}, False),
    ({"mandatory": None}, True),
    ({"mandatory": True}, True),
    ({"mandatory": False}, False),
]


@pytest.mark.parametrize(("given", "mandatory"), FOLLOWS)
def test_the_setting_mandatory_has_the_value_of_message_ids_unless_it_is_set(
    given: dict[str, Any], mandatory: bool
) -> None:
    texts = {name: str(value) for name, value in given.items()}
    query = "&".join(f"{name}={text}" for name, text in texts.items())
    for settings in (
        ProducerSettings(**given),
        load(**given),
        load(settings=ProducerSettings(**given)),
        load(f"{URL}?{query}"),
        load(environ={f"QFLOW_{name.upper()}": text for name, text in texts.items()}),
    ):
        assert settings.is_mandatory is mandatory


def test_mandatory_none_means_the_value_of_message_ids_and_overrides_sources_of_lower_precedence() -> None:
    environ = {"QFLOW_MANDATORY": "1"}
    assert not load(environ=environ, message_ids=False, mandatory=None).is_mandatory
    assert not load(f"{URL}?mandatory=", environ=environ, message_ids=False).is_mandatory
    settings = ProducerSettings(mandatory=None, message_ids=False)
    assert load(settings=settings, environ=environ, message_ids=True).is_mandatory


@pytest.mark.parametrize("text", ["auto", "AUTO"])
def test_the_setting_capacity_accepts_auto_for_an_adaptive_window(text: str) -> None:
    assert load(environ={"QFLOW_CAPACITY": text}).capacity == "auto"
    assert load(f"{URL}?capacity={text}").capacity == "auto"
    assert ProducerSettings(capacity="auto").capacity_max == 10_000
    assert "capacity='auto'" in repr(ProducerSettings(capacity="auto"))


def test_the_setting_mandatory_without_message_ids_is_rejected_from_every_source() -> None:
    refused = "mandatory=True with message_ids=False: .* leave mandatory out"
    with pytest.raises(SettingsError, match=refused):
        ProducerSettings(message_ids=False, mandatory=True)
    with pytest.raises(SettingsError, match=refused):
        load(f"{URL}?message_ids=no", environ={"QFLOW_MANDATORY": "yes"})


@pytest.mark.parametrize(
    ("text", "value"),
    [*((text, True) for text in ("1", "true", "YES", "On")), *((text, False) for text in ("0", "False", "NO", "off"))],
)
def test_the_usual_texts_for_true_and_false_are_accepted_as_values_of_settings(text: str, value: bool) -> None:
    assert load(environ={"QFLOW_MANDATORY": "false", "QFLOW_CONFIRMS": text}).confirms is value


@pytest.mark.parametrize("name", ["max_producer_flow_control_wait", "rate_burst", "capacity_bytes", "mandatory"])
@pytest.mark.parametrize("text", ["none", "None"])
def test_the_text_none_in_the_environment_or_in_a_url_sets_an_optional_setting_to_none(name: str, text: str) -> None:
    assert getattr(load(environ={f"QFLOW_{name.upper()}": text}), name) is None
    assert getattr(load(f"{URL}?{name}={text}"), name) is None
    assert getattr(load(f"{URL}?{name}="), name) is None


@pytest.mark.parametrize("name", [each[0] for each in TEXTS] + ["url"])
def test_an_empty_environment_variable_does_not_set_its_setting(name: str) -> None:
    assert getattr(load(environ={f"QFLOW_{name.upper()}": ""}), name) == default(name)


def test_the_text_forever_in_a_url_means_no_time_limit() -> None:
    assert load(f"{URL}?max_producer_flow_control_wait=forever").max_producer_flow_control_wait is None


def test_the_settings_are_read_from_the_environment_of_the_process_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QFLOW_CAPACITY", "7")
    assert ProducerSettings.load().capacity == 7


WHOLE = "a whole number of messages, at least 1"
WHOLE_OR_AUTO = f"{WHOLE}, or 'auto'"
REFUSED: list[tuple[str, Any, str]] = [
    ("url", "", "an amqp:// or amqps:// URL, or a non-empty sequence of them"),
    ("url", "http://localhost", "an amqp:// or amqps:// URL, or a non-empty sequence of them"),
    ("url", "amqp://[::1", "an amqp:// or amqps:// URL, or a non-empty sequence of them"),
    ("url", "amqp://localhost:70000/", "an amqp:// or amqps:// URL, or a non-empty sequence of them"),
    ("url", "amqp://localhost:port/", "an amqp:// or amqps:// URL, or a non-empty sequence of them"),
    ("url", [], "an amqp:// or amqps:// URL, or a non-empty sequence of them"),
    ("url", [URL, 3], "an amqp:// or amqps:// URL, or a non-empty sequence of them"),
    ("url", b"amqp://localhost", "an amqp:// or amqps:// URL, or a non-empty sequence of them"),
    ("exchange", "x" * 256, "a str of at most 255 bytes"),
    ("exchange", None, "a str of at most 255 bytes"),
    ("routing_key", "é" * 128, "a str of at most 255 bytes"),
    ("routing_key", "\ud800", "a str of at most 255 bytes"),
    ("routing_key", b"k", "a str of at most 255 bytes"),
    ("name", 3, "a str of at most 255 bytes"),
    ("capacity", 0, WHOLE_OR_AUTO),
    ("capacity", -1, WHOLE_OR_AUTO),
    ("capacity", 1.5, WHOLE_OR_AUTO),
    ("capacity", True, WHOLE_OR_AUTO),
    ("capacity", "5", WHOLE_OR_AUTO),
    ("capacity", None, WHOLE_OR_AUTO),
    ("capacity", "Auto", WHOLE_OR_AUTO),
    ("capacity_max", 0, WHOLE),
    ("capacity_max", "auto", WHOLE),
    ("capacity_bytes", 0, "None or a whole number of bytes, at least 1"),
    ("max_producer_flow_control_wait", -0.1, "None (for ever) or seconds, at least 0"),
    ("max_producer_flow_control_wait", float("inf"), "None (for ever) or seconds, at least 0"),
    ("max_producer_flow_control_wait", float("nan"), "None (for ever) or seconds, at least 0"),
    ("max_producer_flow_control_wait", True, "None (for ever) or seconds, at least 0"),
    ("when_flowed", "shed", "'block', 'raise' or 'spill'"),
    ("when_flowed", None, "'block', 'raise' or 'spill'"),
    ("outbox", "", "None or the path of a file"),
    ("outbox", 1, "None or the path of a file"),
    ("outbox", b"o", "None or the path of a file"),
    ("outbox", "o\0", "None or the path of a file"),
    ("outbox_max_bytes", 0, "a whole number of bytes, at least 1"),
    ("outbox_max_age", 0.0, "None (for ever) or seconds, more than 0"),
    ("outbox_full", "spill", "'block' or 'raise'"),
    ("outbox_synchronous", "off", "'normal' or 'full'"),
    ("outbox_keep_undelivered", 1, "True or False"),
    ("confirms", 1, "True or False"),
    ("mandatory", "yes", "None (as message_ids), True or False"),
    ("message_ids", None, "True or False"),
    ("rate", 0, "None or messages per second, more than 0"),
    ("rate_burst", 0, f"None or {WHOLE}"),
    ("max_unwritten_bytes", 0, "a whole number of bytes, at least 1"),
    ("max_failed_bytes", 0, "a whole number of bytes, at least 1"),
    ("max_failed_bytes", None, "a whole number of bytes, at least 1"),
    ("max_flow_events", 0, "a whole number of events, at least 1"),
    ("max_flow_events", 1.5, "a whole number of events, at least 1"),
    ("flow_control_wait_notify_period", 0, "seconds, more than 0"),
    ("connect_timeout", 0.0, "seconds, more than 0"),
    ("connect_timeout", None, "seconds, more than 0"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), REFUSED)
def test_the_error_for_an_invalid_value_names_its_setting_and_the_allowed_values(
    name: str, value: Any, allowed: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        ProducerSettings(**{name: value})
    assert str(caught.value) == f"{name}={hide_password(repr(value))}: it must be {allowed}"
    # As a keyword, `None` means that no URL is given.
    with pytest.raises(SettingsError) as loaded:
        load(**{name: value})
    assert str(loaded.value) == str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        ("capacity", "many", WHOLE_OR_AUTO),
        ("capacity", "0", WHOLE_OR_AUTO),
        ("capacity_bytes", "1.5", "None or a whole number of bytes, at least 1"),
        ("confirms", "maybe", "True or False"),
        ("rate", "nan", "None or messages per second, more than 0"),
        ("when_flowed", "shed", "'block', 'raise' or 'spill'"),
        ("connect_timeout", "soon", "seconds, more than 0"),
        ("routing_key", "k" * 256, "a str of at most 255 bytes"),
    ],
)
def test_the_error_for_an_invalid_setting_names_its_environment_variable_or_url_parameter(
    name: str, text: str, allowed: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        load(environ={f"QFLOW_{name.upper()}": text})
    assert str(caught.value) == f"QFLOW_{name.upper()}={text!r}: it must be {allowed}"
    with pytest.raises(SettingsError) as caught:
        load(f"{URL}?{name}={text}")
    assert str(caught.value) == f"the URL's {name}={text!r}: it must be {allowed}"


def test_the_error_for_an_invalid_setting_shows_only_the_beginning_of_a_long_value() -> None:
    with pytest.raises(SettingsError) as caught:
        ProducerSettings(routing_key="k" * 1_000_000)
    assert (
        str(caught.value) == f"routing_key='{'k' * 999}… (1,000,002 characters): it must be a str of at most 255 bytes"
    )


def test_an_unknown_setting_is_rejected_and_the_error_lists_the_known_settings() -> None:
    with pytest.raises(
        SettingsError, match=r"capcity=\*\*\*: there is no such setting; the settings are url, .*capacity"
    ):
        load(capcity=5)


# URLs.


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("amqp:///vhost", "it names no host, such as amqp://localhost"),
        ("AMQPS://", "it names no host, such as amqp://localhost"),
        ("amqp://user:secret@localhost//", "the virtual host / is written /%2F, or left out"),
    ],
)
def test_an_incomplete_url_is_rejected_and_the_error_shows_the_missing_part(url: str, hint: str) -> None:
    with pytest.raises(SettingsError, match=f"; {re.escape(hint)}$") as caught:
        ProducerSettings(url=url)
    assert "secret" not in str(caught.value)


def test_a_list_of_urls_gives_the_hosts_to_try_in_this_order() -> None:
    urls = ["amqp://one/", "amqps://two/vhost"]
    assert ProducerSettings(url=urls).urls == tuple(urls)
    assert load(urls).urls == tuple(urls)
    assert ProducerSettings(url=urls).url == tuple(urls), "and cannot be changed any more"
    assert ProducerSettings(url=URL).urls == (URL,)


def test_the_broker_url_is_taken_from_the_first_source_that_has_one() -> None:
    environ = {"QFLOW_URL": "amqp://env/"}
    settings = ProducerSettings(url="amqp://settings/")
    assert load(environ=environ).urls == ("amqp://env/",)
    assert load(settings=settings, environ=environ).urls == ("amqp://settings/",)
    assert load("amqp://keyword/", settings, environ=environ).urls == ("amqp://keyword/",)
    assert load(settings=settings, url="amqp://keyword/").urls == ("amqp://keyword/",)


@pytest.mark.parametrize("separator", [",", ", ", " , "])
def test_in_a_text_of_several_urls_only_a_comma_before_a_url_scheme_separates_urls(separator: str) -> None:
    one = "amqps://one/?ssl_options={'certfile': 'a.pem', 'keyfile': 'a.key'}"
    two = "amqps://u:p,w@two:5671/v?client_properties={'a': 1,'b': 2}"
    assert load(environ={"QFLOW_URL": one}).url == one
    assert load(environ={"QFLOW_URL": f"{one}{separator}{two}"}).url == (one, two)
    for text in ("amqp://one/,two", "amqp://one,two", "amqp://one:1,two:2", "amqp://one,,amqp://two", "amqp://one,"):
        with pytest.raises(SettingsError, match=f"QFLOW_URL='{text}': it must be an amqp://"):
            load(environ={"QFLOW_URL": text})
    with pytest.raises(SettingsError, match="QFLOW_URL='one': it must be an amqp://"):
        load(environ={"QFLOW_URL": "one"})


def test_of_several_urls_the_first_one_that_contains_a_setting_gives_its_value() -> None:
    settings = load(["amqp://one/?capacity=1", "amqp://two/?capacity=2&rate=3"])
    assert (settings.capacity, settings.rate) == (1, 3.0)


@pytest.mark.parametrize(
    "urls",
    [
        ["amqp://one/?capacity=0"],
        ["amqp://one/", "amqp://two/?capacity=0"],
        ["amqp://one/?capacity=5", "amqp://two/?capacity=0"],
        ["amqp://one/?capacity=0&capacity=5"],
    ],
)
def test_an_invalid_value_in_the_query_of_any_url_is_rejected_even_if_another_source_overrides_it(
    urls: list[str],
) -> None:
    refused = f"the URL's capacity='0': it must be {WHOLE}"
    with pytest.raises(SettingsError, match=refused):
        load(urls)
    with pytest.raises(SettingsError, match=refused):
        load(urls, capacity=7)
    with pytest.raises(SettingsError, match=refused):
        ProducerSettings(url=urls)
    with pytest.raises(SettingsError, match=refused):
        load(environ={"QFLOW_URL": ",".join(urls)})


def test_query_parameters_of_pika_are_passed_to_pika_and_qflow_settings_are_not() -> None:
    url = "amqp://u:p@host:1/v%2Fh?heartbeat=3&capacity=5&ssl_options=%7B%27a%27%3A+1%7D&name=n&blank="
    settings = load(url)
    assert (settings.capacity, settings.name) == (5, "n")
    assert settings.urls == ("amqp://u:p@host:1/v%2Fh?heartbeat=3&ssl_options=%7B%27a%27%3A+1%7D&blank=",)


def test_settings_in_a_url_inside_the_query_of_another_url_are_ignored() -> None:
    assert load("amqp://host/?url=amqp://other/").urls == ("amqp://host/?url=amqp%3A%2F%2Fother%2F",)


# Passwords.

SECRETS = [
    "amqp://user:secret@host/",
    "amqp://:secret@host/",
    "amqp://user:sec,secret@host:5672/v?heartbeat=3",
    "amqp://user:secret@[::1]:5672/",
    "amqp://one:secret@host,amqp://two:secret@host",
    "amqp://host,amqp://two:secret@host",
    "amqp://host:5672,amqp://two:secret@host",
]


@pytest.mark.parametrize("url", SECRETS)
def test_a_url_is_shown_without_its_password(url: str) -> None:
    shown = hide_password(url)
    assert "secret" not in shown
    assert "***@" in shown


@pytest.mark.parametrize("url", SECRETS[:4])
def test_the_repr_of_the_settings_does_not_show_the_password_of_a_url(url: str) -> None:
    assert "secret" not in repr(ProducerSettings(url=url))
    assert "secret" not in repr(ProducerSettings(url=[url, url]))
    assert "secret" not in repr(load(environ={"QFLOW_URL": SECRETS[4]}))


@pytest.mark.parametrize("url", ["amqp://host:5672/", "amqp://user@host/", "amqp://host/?name=me@box", "no URL"])
def test_a_url_without_a_password_is_shown_unchanged(url: str) -> None:
    assert hide_password(url) == url


@pytest.mark.parametrize(
    "url",
    [
        *(url.replace("amqp", "http") for url in SECRETS),
        "amqp://user:sec/secret@host",
        "amqp://u:s?secret@h:x",
        "amqp://u:12#3secret@h",
        "amqp://u:12%23#secret@h/?heartbeat=3",
    ],
)
def test_an_error_about_a_url_does_not_show_its_password(url: str) -> None:
    refused: list[Any] = [url, [url], [URL, url]]
    for value in refused:
        with pytest.raises(SettingsError) as caught:
            ProducerSettings(url=value)
        assert "secret" not in str(caught.value)
        with pytest.raises(SettingsError) as caught:
            load(value)
        assert "secret" not in str(caught.value)
    with pytest.raises(SettingsError) as caught:
        load(environ={"QFLOW_URL": url})
    assert "secret" not in str(caught.value)
    with pytest.raises(SettingsError) as caught:
        load(environ={"QFLOW_URL": f"{URL},{url}"})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["amqp://u:12#3secret@h", "amqp://h/v#", "amqp://h/?routing_key=#"])
def test_a_url_with_a_fragment_is_rejected_and_the_error_says_how_to_encode_the_hash_sign(url: str) -> None:
    with pytest.raises(SettingsError, match=r"it must be an amqp:// .*; a # is written %23$") as caught:
        ProducerSettings(url=url)
    assert "secret" not in str(caught.value)
    with pytest.raises(SettingsError, match=r"QFLOW_URL=.*; a # is written %23$"):
        load(environ={"QFLOW_URL": url})
    assert load("amqp://u:12%233@h/?routing_key=%23").routing_key == "#"


def test_a_setting_changed_by_replace_counts_as_set_and_all_other_settings_keep_their_source() -> None:
    environ = {"QFLOW_CAPACITY": "7", "QFLOW_RATE": "5", "QFLOW_MANDATORY": "no", "QFLOW_NAME": "environment"}
    settings = ProducerSettings(mandatory=None, rate=3).replace(name="replaced").replace(rate_burst=2)
    assert settings == ProducerSettings(mandatory=None, rate=3, name="replaced", rate_burst=2)
    loaded = load(settings=settings, environ=environ)
    assert (loaded.capacity, loaded.rate, loaded.mandatory, loaded.name, loaded.rate_burst) == (
        7,
        3,
        None,
        "replaced",
        2,
    )


def test_every_setting_counts_as_set_in_a_copy_made_by_dataclasses_replace() -> None:
    settings = replace(ProducerSettings(url=f"{URL}?rate=3"), name="replaced")
    assert settings == ProducerSettings(url=f"{URL}?rate=3", name="replaced")
    loaded = load(URL, settings=settings, environ={"QFLOW_CAPACITY": "7"})
    assert (loaded.capacity, loaded.rate) == (1000, 3)


@pytest.mark.parametrize(("name", "text", "value"), CHANGED)
def test_the_method_replace_keeps_the_settings_in_the_query_of_the_url(name: str, text: str, value: Any) -> None:
    settings = ProducerSettings(url=f"{URL}?{name}={text}")
    assert getattr(settings, name) == value
    assert getattr(load(settings=settings), name) == value
    given: dict[str, Any] = {"url": f"{URL}?{name}={text}", name: default(name)}
    assert getattr(ProducerSettings(**given), name) == default(name)
    assert getattr(load(f"{URL}?", settings), name) == default(name), "of another URL"
    assert getattr(settings.replace(url=URL), name) == default(name), "likewise"
    assert getattr(ProducerSettings().replace(url=settings.url), name) == value


@pytest.mark.parametrize(("name", "text", "value"), CHANGED)
def test_a_setting_replaced_by_its_default_overrides_the_url_and_the_environment(
    name: str, text: str, value: Any
) -> None:
    settings = ProducerSettings(url=f"{URL}?{name}={text}").replace(**{name: default(name)})
    settings = settings.replace(flow_control_wait_notify_period=settings.flow_control_wait_notify_period)
    assert getattr(settings, name) == default(name)
    environ = {f"QFLOW_{name.upper()}": text}
    assert getattr(load(settings=settings, environ=environ), name) == default(name)
    assert getattr(load(f"{URL}?{name}={text}", settings), name) == default(name)
    for copied in (copy.copy(settings), copy.deepcopy(settings), pickle.loads(pickle.dumps(settings))):
        assert copied == settings
        assert getattr(load(settings=copied, environ=environ), name) == default(name)


def test_a_setting_that_contradicts_the_url_is_rejected() -> None:
    with pytest.raises(SettingsError, match="when_flowed='spill' with outbox=None"):
        ProducerSettings(url=f"{URL}?when_flowed=spill")
    assert ProducerSettings(url=f"{URL}?when_flowed=spill&outbox=o").when_flowed is WhenFlowed.SPILL


# Variables that look like settings.


@pytest.fixture
def nothing_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qflow_client.settings._examined", set())


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("QFLOW_CAPCITY", "QFLOW_CAPACITY"),
        ("QFLOW_URLS", "QFLOW_URL"),
        ("QFLOW_MAX_FLOW_CONTROL_WAIT", "QFLOW_MAX_PRODUCER_FLOW_CONTROL_WAIT"),
        ("QFLOW_Capacity", "QFLOW_CAPACITY"),
        ("qflow_capacity", "QFLOW_CAPACITY"),
    ],
)
@pytest.mark.usefixtures("nothing_was_said")
def test_an_environment_variable_whose_name_is_almost_a_setting_causes_one_warning(name: str, meant: str) -> None:
    said = f"the environment variable {name} is not a setting of qflow_client and is ignored; did you mean {meant}?"
    with pytest.warns(UserWarning, match=f"^{re.escape(said)}$") as warned:
        assert load(environ={name: "amqp://u:s3cr3t-pw@h"}).capacity == 1000
    assert len(warned) == 1
    assert load(environ={name: "5"}).capacity == 1000


@pytest.mark.usefixtures("nothing_was_said")
def test_a_parameter_of_a_url_whose_name_is_almost_a_setting_causes_one_warning() -> None:
    urls = [f"{URL}?heartbeat=5&blocked_connection_timeout=5&ssl_options={{}}", f"{URL}?capcity=s3cr3t-pw"]
    said = "the URL's parameter capcity is not a setting of qflow_client and is ignored; did you mean capacity?"
    with pytest.warns(UserWarning, match=f"^{re.escape(said)}$") as warned:
        assert load(urls).capacity == 1000
    assert len(warned) == 1
    assert load(urls).capacity == 1000


@pytest.mark.usefixtures("nothing_was_said")
def test_unrelated_environment_variables_cause_no_warning() -> None:
    words = [
        "REQUIRE_BROKERS",
        "FLIGHTS",
        "RABBITMQ_URL",
        "BROKER_URL",
        "BROKERJ_URL",
        "KILLS",
        "CONTAINERS",
        "CHROMIUM",
    ]
    words += ["COMPATIBILITY", "MODEL_STEPS", "FLOW_TO_DISK", "HTTP_TOKEN", "ADMIN_URL", "USERS"]
    load(environ={f"QFLOW_{word}": "1" for word in words} | {"OFLOW_CAPCITY": "5"})


def test_the_repr_of_producer_settings_shows_only_settings_that_differ_from_the_defaults() -> None:
    assert repr(ProducerSettings()) == "ProducerSettings(url='amqp://guest:***@localhost:5672/%2F')"
    settings = ProducerSettings(url=["amqp://one/", "amqp://two/"], capacity=5, name="n")
    assert repr(settings) == "ProducerSettings(url=['amqp://one/', 'amqp://two/'], capacity=5, name='n')"


def test_producer_settings_compare_and_hash_by_value() -> None:
    assert ProducerSettings(capacity=5) == ProducerSettings(capacity=5)
    assert len({ProducerSettings(url=[URL]), ProducerSettings(url=[URL])}) == 1
    with pytest.raises(AttributeError):
        ProducerSettings().capacity = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"when_flowed": "spill"},
            "when_flowed='spill' with outbox=None: there is no outbox to put messages into; set outbox",
        ),
        (
            {"outbox": "o", "confirms": False},
            "outbox='o' with confirms=False: a message stays in it until it is confirmed",
        ),
        (
            {"outbox": "o", "message_ids": False},
            "outbox='o' with message_ids=False: second copies are recognized by their",
        ),
        ({"capacity": "auto", "confirms": False}, "capacity='auto' with confirms=False: .* give a number"),
        ({"liveness": 2.0, "confirms": False}, r"liveness=2\.0 with confirms=False: .* leave liveness out"),
        (
            {"on_blocked": "failover", "reconnect_timeout": 0},
            "on_blocked='failover' with reconnect_timeout=0: .* set a longer reconnect_timeout",
        ),
    ],
)
def test_E15_a_setting_that_needs_another_setting_is_rejected_without_it(given: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        load(**given)


def test_the_setting_outbox_accepts_a_path_object() -> None:
    assert load(outbox=Path("orders.outbox")).outbox == "orders.outbox"
