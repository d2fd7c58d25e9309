from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from qflow_client.broker import Broker, BrokerSettings
from qflow_client.broker.http.operations import api
from qflow_client.broker.policies import arguments

PAGE = (Path(__file__).parents[3] / "docs" / "broker.md").read_text()


@pytest.mark.parametrize("example", re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
def test_the_examples_in_the_documentation_of_the_broker_run(example):
    exec(compile(example, "docs/broker.md", "exec"), {})


def test_every_setting_of_the_broker_is_documented_with_its_default():
    settings = PAGE.split("## Settings")[1].split("##")[0]
    rows = re.findall(r"^\| (`.*?`) \| (.*?) \|", settings, re.MULTILINE)
    told = {}
    for names, defaults in rows:
        for name, default in zip(names.split(", "), re.findall(r"`(.*?)`", defaults), strict=True):
            told[name.strip("`")] = default
    expected = BrokerSettings()
    assert told.keys() == {field.name for field in fields(BrokerSettings)}
    for name, default in told.items():
        value = getattr(expected, name)
        assert eval(default) == (dict(value) if name == "users" else value), name


def test_every_queue_argument_is_documented():
    section = PAGE.split("## Queue arguments")[1].split("\n## ")[0]
    names = [value for name, value in vars(arguments).items() if name.isupper() and isinstance(value, str)]
    assert len(names) == 23
    assert all(f"| `{name}` |" in section for name in names)


def test_every_public_method_of_the_broker_is_documented():
    methods = [name for name in dir(Broker) if not name.startswith("_") and name not in ("port", "url")]
    missing = [name for name in methods if f"`{name}" not in PAGE and f"await {name}" not in PAGE]
    assert missing == []


def test_every_operation_of_the_http_api_is_documented():
    page = (Path(__file__).parents[3] / "docs" / "http.md").read_text()
    told = set()
    for methods, paths in re.findall(r"^\| (`[A-Z`, ]+`) \| (`/.*?`) \|", page, re.MULTILINE):
        told |= {(method, path) for method in re.findall(r"\w+", methods) for path in re.findall(r"`(.*?)`", paths)}
    assert told == {(operation.method, operation.path) for operation in api.operations}
