"""E8: errors and texts about the options of a job contain no password."""

from __future__ import annotations

import re
import traceback

import pytest

from qflow_client import ConnectionFailed, ProducerSettings, SettingsError
from qflow_client.spark.creditqueue import prepare
from qflow_client.spark.intake import connect
from qflow_client.spark.offset_source import OffsetOptions
from qflow_client.spark.options import SinkOptions
from qflow_client.spark.source import SourceOptions

SECRET = re.compile("s3cr3t|cr3t|3cr3")
URL = "amqp://user:s3cr3t-pw@127.0.0.1:1/%2F"
BAD = [
    "amqp://user:s3cr3t/cr3t-pw@127.0.0.1:1/",
    "amqp://user:s3cr3t-pw",
    "user:s3cr3t-pw@127.0.0.1",
    f"{URL}?heartbeat=amqp://u:s3cr3t@h",
    f"{URL}?ssl_options={{'password': 's3cr3t-pw'",
]


@pytest.mark.parametrize("name", ["url", "urls", "password", "capacity", "rate", "bodyFormat", "maxConcurrentTasks"])
def test_E8_the_error_for_an_invalid_option_contains_no_password(name: str) -> None:
    for value in BAD if name == "url" else [URL, *BAD]:
        try:
            options = SinkOptions.load({name: value}, 1)
        except SettingsError as error:
            told = "".join(traceback.format_exception(error))
        else:
            told = repr(options)
        assert not SECRET.search(told)


def test_E8_the_repr_of_options_contains_no_password() -> None:
    source = SourceOptions.load({"url": URL, "queue": "q", "spoolPath": "spool"}, streaming=False, slots=1, local=True)
    offsets = OffsetOptions.load({"url": URL, "stream": "s"}, streaming=False, slots=1)
    assert not SECRET.search(f"{source} {offsets} {SinkOptions.load({'url': URL}, 1)}")


@pytest.mark.parametrize("url", [URL, BAD[3], BAD[4]])
def test_E8_the_error_for_an_unreachable_broker_contains_no_password(url: str) -> None:
    for connecting in (lambda: connect([url], 5), lambda: prepare(ProducerSettings(url=url), "credits")):
        with pytest.raises((ConnectionFailed, SettingsError)) as caught:
            connecting()
        assert not SECRET.search("".join(traceback.format_exception(caught.value)))
