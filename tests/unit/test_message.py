"""The messages of a producer."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta, timezone
from types import MappingProxyType
from typing import Any

import pytest

from qflow_client.message import DeliveryMode, Message, RoutedMessage, as_body
from tests.unit.messages import PROPERTIES

SHORT_STRINGS = (
    "content_type",
    "content_encoding",
    "correlation_id",
    "reply_to",
    "message_id",
    "type",
    "user_id",
    "app_id",
    "cluster_id",
)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"abc", b"abc"),
        (bytearray(b"abc"), b"abc"),
        (memoryview(b"abc"), b"abc"),
        (memoryview(b"a.b.c")[::2], b"abc"),
        ("Grüße", "Grüße".encode()),
        (b"", b""),
        ("", b""),
    ],
)
def test_the_body_of_a_message_can_be_bytes_or_text(body: Any, expected: bytes) -> None:
    assert Message(body).body == expected
    assert type(Message(body).body) is bytes
    assert as_body(body) == expected


def test_a_message_does_not_copy_a_body_of_bytes() -> None:
    body = b"large"
    assert Message(body).body is body


def test_a_message_copies_a_body_that_is_a_mutable_buffer() -> None:
    buffer = bytearray(b"before")
    message = Message(buffer)
    buffer[:] = b"after!"
    assert message.body == b"before"


@pytest.mark.parametrize("body", [None, 5, ["a"], {"a": 1}, object()])
def test_a_body_that_is_not_bytes_or_text_raises_an_error_that_says_how_to_convert_it(body: Any) -> None:
    with pytest.raises(TypeError, match=rf"not {type(body).__name__}; encode it first \(json"):
        Message(body)


def test_a_message_is_persistent_by_default() -> None:
    message = Message(b"")
    assert message.delivery_mode == DeliveryMode.PERSISTENT
    assert int(DeliveryMode.PERSISTENT) == 2
    assert Message(b"", delivery_mode=DeliveryMode.TRANSIENT).delivery_mode == 1
    assert Message(b"", delivery_mode=None).delivery_mode is None
    others = [field.name for field in dataclasses.fields(Message) if field.name not in ("body", "delivery_mode")]
    assert all(getattr(message, name) is None for name in others)


def test_the_attributes_of_a_message_cannot_be_changed() -> None:
    message = Message(b"", type="flight")
    for name in ("body", "type", "headers", "other"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(message, name, "other")
    with pytest.raises(dataclasses.FrozenInstanceError):
        del message.type


def test_a_message_is_a_dataclass_and_takes_its_properties_by_name_or_position() -> None:
    message = Message(b"body", **PROPERTIES)
    assert message == Message(b"body", *PROPERTIES.values())
    assert dataclasses.asdict(message) == {"body": b"body", **PROPERTIES}
    for name, value in PROPERTIES.items():
        no_value: dict[str, Any] = {name: None}
        without = dataclasses.replace(message, **no_value)
        assert (getattr(message, name), getattr(without, name)) == (value, None)
        assert without != message
        assert f"{name}=None" in repr(without)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda message: pickle.loads(pickle.dumps(message))])
@pytest.mark.parametrize("message", [Message(b""), Message(b"", delivery_mode=None), Message(b"body", **PROPERTIES)])
def test_a_copy_of_a_message_equals_the_message(copied: Callable[[Message], Message], message: Message) -> None:
    assert copied(message) == message


def test_messages_without_headers_are_hashable() -> None:
    assert len({Message(b"a"), Message(b"a"), Message(b"b"), Message(b"a", priority=1)}) == 3


@dataclasses.dataclass(frozen=True)
class Order(Message):
    """A message class of an application."""

    customer: str = ""


def test_the_properties_of_a_message_subclass_are_checked_like_those_of_a_message() -> None:
    body: Any = "text"
    order = Order(body, type="order", customer="Ann")
    assert (order.body, order.type, order.customer, order.delivery_mode) == (b"text", "order", "Ann", 2)
    with pytest.raises(ValueError, match="priority must be from 0 to 255, not 256"):
        Order(b"", priority=256)


# Short strings.


@pytest.mark.parametrize("name", SHORT_STRINGS)
def test_a_short_string_property_with_more_than_255_bytes_raises_an_error(name: str) -> None:
    values: dict[str, Any]
    for fits in ("", "x" * 255, "ü" * 127 + "x", "😀" * 63):
        values = {name: fits}
        assert getattr(Message(b"", **values), name) == fits
    for too_long in ("x" * 256, "ü" * 128, "😀" * 64):
        values = {name: too_long}
        with pytest.raises(ValueError, match=f"{name} has 256 bytes; AMQP carries at most 255"):
            Message(b"", **values)


@pytest.mark.parametrize("name", [*SHORT_STRINGS, "expiration"])
@pytest.mark.parametrize("value", [b"bytes", 60000])
def test_a_property_of_a_message_that_must_be_a_str_rejects_other_types(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{name} must be a str, not {type(value).__name__}"):
        Message(b"", **{name: value})


@pytest.mark.parametrize("name", SHORT_STRINGS)
def test_a_property_that_is_not_valid_unicode_raises_an_error_when_the_message_is_made(name: str) -> None:
    values: dict[str, Any] = {name: "\ud800"}
    with pytest.raises(ValueError, match=f"{name} cannot be encoded as UTF-8"):
        Message(b"", **values)


@pytest.mark.parametrize("expiration", ["0", "60000", "0060000"])
def test_the_expiration_of_a_message_may_be_a_string_of_digits(expiration: str) -> None:
    assert Message(b"", expiration=expiration).expiration == expiration


@pytest.mark.parametrize("expiration", ["", "-1", "1.5", "1e3", " 1", "soon", "٣", "²"])
def test_an_expiration_that_is_not_a_string_of_digits_raises_an_error(expiration: str) -> None:
    with pytest.raises(ValueError, match="expiration must be milliseconds as a string of digits"):
        Message(b"", expiration=expiration)


# Numbers.


@pytest.mark.parametrize(
    ("name", "lowest", "highest"), [("delivery_mode", 1, 2), ("priority", 0, 255), ("timestamp", 0, (1 << 63) - 1)]
)
def test_a_numeric_property_of_a_message_must_be_in_the_range_of_its_amqp_field(
    name: str, lowest: int, highest: int
) -> None:
    for fits in (lowest, highest):
        assert getattr(Message(b"", **{name: fits}), name) == fits  # type: ignore[arg-type]
    for beyond in (lowest - 1, highest + 1):
        with pytest.raises(ValueError, match=f"{name} must be from {lowest} to {highest}, not {beyond}"):
            Message(b"", **{name: beyond})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["delivery_mode", "priority", "timestamp"])
@pytest.mark.parametrize("value", [True, 1.0, "1"])
def test_a_numeric_property_of_a_message_must_be_an_int(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{name} must be an int, not {type(value).__name__}"):
        Message(b"", **{name: value})


# Times.

EAST, WEST = timezone(timedelta(hours=14)), timezone(timedelta(hours=-12))


@pytest.mark.parametrize(
    "timestamp",
    [
        datetime(1970, 1, 1, tzinfo=UTC),
        datetime(1970, 1, 1, 14, tzinfo=EAST),
        datetime(1969, 12, 31, 12, tzinfo=WEST),
        datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC),
        datetime(2013, 1, 1, 5, 15),
    ],
)
def test_the_timestamp_of_a_message_can_be_a_datetime_since_1970(timestamp: datetime) -> None:
    assert Message(b"", timestamp=timestamp).timestamp is timestamp


@pytest.mark.parametrize(
    "timestamp",
    [
        datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC),
        datetime(1970, 1, 1, 13, 59, 59, tzinfo=EAST),
        datetime(1960, 7, 1),
        datetime.min.replace(tzinfo=EAST),
        datetime.max.replace(tzinfo=WEST),
    ],
)
def test_a_timestamp_that_amqp_cannot_carry_raises_an_error(timestamp: datetime) -> None:
    with pytest.raises(ValueError, match="timestamp must be from 1970 to 9999"):
        Message(b"", timestamp=timestamp)


# Headers.


@pytest.mark.parametrize("headers", [{}, {"a": 1}, MappingProxyType({"a": 1})])
def test_the_headers_of_a_message_may_be_any_mapping(headers: Mapping[str, Any]) -> None:
    assert Message(b"", headers=headers).headers == headers


@pytest.mark.parametrize("headers", [[("a", 1)], "a=1", 5])
def test_headers_of_a_message_that_are_not_a_mapping_raise_an_error(headers: Any) -> None:
    with pytest.raises(TypeError, match=f"headers must be a mapping, not {type(headers).__name__}"):
        Message(b"", headers=headers)


@pytest.mark.parametrize(
    "value",
    [
        "text",
        None,
        2.5,
        datetime(2026, 1, 2, tzinfo=UTC),
        [1, [2, {"a": b"b"}]],
        (1, [2]),
        {"a": {"b": [3]}},
        MappingProxyType({"a": [1]}),
        bytearray(b"bytes"),
        memoryview(b"bytes"),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("remake", [lambda message: message, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_E3_the_headers_of_a_message_equal_the_given_ones_and_are_deeply_immutable(remake: Any, value: Any) -> None:
    headers = {"key": value}
    message = remake(Message(b"body", headers=headers))
    assert message.headers == headers
    assert _changeable(message.headers, headers) == []


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda headers: pickle.loads(pickle.dumps(headers))])
def test_E3_a_copy_of_the_headers_of_a_message_can_be_changed(copied: Any) -> None:
    message = Message(b"body", headers={"tries": 1, "path": [{"host": "a"}]})
    headers = copied(message.headers)
    headers["tries"] += 1
    headers["path"].append({"host": "b"})
    headers["path"][0]["host"] = "c"
    assert message.headers == {"tries": 1, "path": [{"host": "a"}]}
    assert Message(b"body", headers=headers).headers == {"tries": 2, "path": [{"host": "c"}, {"host": "b"}]}


def _changeable(own: Any, given: Any) -> list[Any]:
    """Return the values that can be changed, or that the caller also has and can change."""
    found = [own] if own is given and isinstance(own, (dict, list, bytearray, memoryview, MappingProxyType)) else []
    if isinstance(own, dict):
        for change in (
            lambda: own.__setitem__("key", 1),
            lambda: own.__delitem__("key"),
            lambda: own.__ior__({}),
            own.clear,
            lambda: own.pop("key"),
            own.popitem,
            lambda: own.setdefault("key", 1),
            lambda: own.update(key=1),
        ):
            with pytest.raises(TypeError, match="headers cannot be changed"):
                change()
        return found + [each for key in own for each in _changeable(own[key], given[key])]
    if isinstance(own, list):
        for change in (
            lambda: own.__setitem__(0, 1),
            lambda: own.__delitem__(0),
            lambda: own.__iadd__([1]),
            lambda: own.__imul__(2),
            lambda: own.append(1),
            own.clear,
            lambda: own.extend([1]),
            lambda: own.insert(0, 1),
            own.pop,
            lambda: own.remove(1),
            own.reverse,
            own.sort,
        ):
            with pytest.raises(TypeError, match="headers cannot be changed"):
                change()
    if isinstance(own, (list, tuple)):
        return found + [each for a, b in zip(own, given, strict=True) for each in _changeable(a, b)]
    return found


def test_headers_that_contain_themselves_or_change_while_they_are_copied_raise_an_error() -> None:
    endless: dict[str, Any] = {}
    endless["self"] = endless["once more"] = endless
    with pytest.raises(ValueError, match="a value that contains itself cannot be sent"):
        Message(b"", headers=endless)

    class Changing(dict[str, Any]):
        def items(self) -> Any:
            for item in super().items():
                self["more"] = 1
                yield item

    with pytest.raises(ValueError, match="headers cannot be copied: dictionary changed size"):
        Message(b"", headers={"inner": Changing(a=1)})


def test_a_routed_message_equals_the_plain_message_and_copies_of_it_keep_the_route() -> None:
    message = Message(b"body", headers={"a": [1]}, priority=3)
    routed = RoutedMessage(b"body", headers={"a": [1]}, priority=3, exchange="ex", routing_key="key")
    assert routed == message
    assert message == routed
    assert routed == RoutedMessage.copy_of(message, "other", "key")
    assert routed != Message(b"body", priority=3)
    assert routed != b"body"
    plain = RoutedMessage(b"body", routing_key="key")
    assert hash(plain) == hash(Message(b"body"))
    assert "exchange='ex', routing_key='key'" in repr(routed)
    for again in (
        copy.copy(routed),
        copy.deepcopy(routed),
        pickle.loads(pickle.dumps(routed)),
        dataclasses.replace(routed, app_id="another"),
        RoutedMessage.copy_of(message, "ex", "key"),
    ):
        assert type(again) is RoutedMessage
        assert (again.exchange, again.routing_key, again.headers) == ("ex", "key", {"a": [1]})
    with pytest.raises(dataclasses.FrozenInstanceError):
        routed.exchange = "other"  # type: ignore[misc]  # it is what must fail


def test_a_routed_message_whose_exchange_or_routing_key_amqp_cannot_carry_raises_an_error() -> None:
    with pytest.raises(ValueError, match="routing_key has 256 bytes"):
        RoutedMessage(b"", routing_key="k" * 256)
    with pytest.raises(TypeError, match="exchange"):
        RoutedMessage(b"", exchange=1)  # type: ignore[arg-type]  # it is what must fail


def test_a_routed_copy_of_a_message_subclass_has_only_the_amqp_properties() -> None:
    class Own(Message):
        pass

    own = Own(b"body", priority=3)
    own.__dict__["note"] = "not a property"
    made = RoutedMessage.copy_of(own, "", "key")
    assert made == Message(b"body", priority=3)
    assert "note" not in made.__dict__
