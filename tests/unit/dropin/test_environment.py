"""The environment of a process applies to all of its producers. A drop-in takes the settings that it supports."""

from __future__ import annotations

import pytest

from qflow_client import OnOutboxFull, SettingsError, WhenFlowed
from qflow_client.aio_pika.flow import AIO_PIKA
from qflow_client.dropin import DropIn
from qflow_client.kombu.flow import KOMBU
from qflow_client.pika.flow import PIKA

pytestmark = pytest.mark.parametrize("drop_in", [PIKA, AIO_PIKA, KOMBU], ids=lambda each: each.library)

OUTBOX = {
    "outbox": "orders.outbox",
    "outbox_max_bytes": "5",
    "outbox_max_age": "5",
    "outbox_full": "raise",
    "outbox_synchronous": "full",
    "outbox_keep_undelivered": "true",
}


def test_a_drop_in_ignores_the_environment_variable_of_a_setting_that_it_does_not_have(
    drop_in: DropIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in drop_in.not_taken:
        monkeypatch.setenv(f"QFLOW_{name.upper()}", "nonsense: it is not even looked at")
    for name, text in OUTBOX.items():
        monkeypatch.setenv(f"QFLOW_{name.upper()}", text)
    monkeypatch.setenv("QFLOW_CAPACITY", "7")
    settings = drop_in.settings()
    assert (settings.capacity, settings.outbox, settings.outbox_full) == (7, None, OnOutboxFull.BLOCK)
    assert not settings.tracing


def test_the_environment_cannot_enable_spilling_in_a_drop_in_because_it_has_no_outbox(
    drop_in: DropIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QFLOW_WHEN_FLOWED", "spill")
    assert drop_in.settings().when_flowed is WhenFlowed.BLOCK
    monkeypatch.setenv("QFLOW_WHEN_FLOWED", "raise")
    assert drop_in.settings().when_flowed is WhenFlowed.RAISE


@pytest.mark.parametrize("name", OUTBOX)
def test_an_outbox_argument_to_a_drop_in_raises_an_error_that_names_an_alternative(drop_in: DropIn, name: str) -> None:
    words = f"{name} is not a setting of a connection of {drop_in.library}: .* Producer"
    with pytest.raises(TypeError, match=words):
        drop_in.split([(name, OUTBOX[name])])
    with pytest.raises(TypeError, match=words):
        drop_in.of_url(f"amqp://localhost?{name}={OUTBOX[name]}")
    with pytest.raises(SettingsError, match="when_flowed='spill' with outbox=None"):
        drop_in.settings(when_flowed="spill")
