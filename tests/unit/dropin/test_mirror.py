"""The names that the modules of the drop-in for pika take from pika."""

from __future__ import annotations

import subprocess
import sys
import warnings
from importlib import import_module
from pkgutil import walk_packages
from unittest import mock

import pika
import pytest

import qflow_client.pika
import qflow_client.pika.adapters.select_connection as ours

theirs = pika.adapters.select_connection

# Adapters for libraries that need not be installed.
OPTIONAL = {"gevent_connection", "tornado_connection", "twisted_connection"}
MODULES = [name for _, name, _ in walk_packages(pika.__path__, "pika.") if name.rsplit(".", 1)[1] not in OPTIONAL]


@pytest.mark.parametrize("name", MODULES)
def test_E11_every_module_of_pika_can_be_imported_under_the_name_of_the_drop_in(name: str) -> None:
    original, found = import_module(name), import_module(f"qflow_client.{name}")
    assert found is original or getattr(found, "__all__", None)
    assert {each for each in vars(original) if not each.startswith("_")} <= set(dir(found))


def test_E11_modules_can_be_imported_before_any_other_module_of_the_drop_in() -> None:
    lines = "; ".join(f"import qflow_client.{name} as m{number}" for number, name in enumerate(reversed(MODULES)))
    subprocess.run([sys.executable, "-W", "error", "-c", lines], check=True, timeout=60)


@pytest.mark.parametrize("name", ["pika", "pika.adapters", "pika.channel", "pika.adapters.select_connection"])
def test_E11_a_star_import_of_the_drop_in_has_every_name_of_pika(name: str) -> None:
    original: dict[str, object] = {}
    found: dict[str, object] = {}
    exec(f"from {name} import *", original)
    exec(f"from qflow_client.{name} import *", found)
    # Without __all__ a star import gets the modules that were imported before.
    assert original.keys() - OPTIONAL <= found.keys()


def test_E11_assigning_to_an_attribute_of_the_drop_in_also_sets_it_in_pika_and_can_be_undone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = theirs.SELECT_TYPE
    monkeypatch.setattr(ours, "SELECT_TYPE", "poll")
    assert (theirs.SELECT_TYPE, ours.SELECT_TYPE) == ("poll", "poll")
    monkeypatch.undo()
    assert before == theirs.SELECT_TYPE
    with mock.patch("qflow_client.pika.adapters.select_connection.SELECT_TYPE", "select"):
        assert str(theirs.SELECT_TYPE) == "select"
    assert before == theirs.SELECT_TYPE


def test_E11_assigning_to_an_attribute_that_only_the_drop_in_has_does_not_change_pika(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = theirs.SelectConnection
    monkeypatch.setattr(ours, "SelectConnection", None)
    monkeypatch.setattr(ours, "new", 1, raising=False)
    assert theirs.SelectConnection is before
    assert not hasattr(theirs, "new")
    monkeypatch.undo()
    assert not hasattr(ours, "new")


def test_E11_using_an_unknown_connection_class_logs_one_warning_that_it_has_no_flow_control(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class NewConnection(theirs.SelectConnection):
        pass

    monkeypatch.setattr(pika.adapters, "NewConnection", NewConnection, raising=False)
    with pytest.warns(RuntimeWarning, match="NewConnection has no flow control, because qflow_client does not know it"):
        assert qflow_client.pika.adapters.NewConnection is NewConnection
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert qflow_client.pika.adapters.NewConnection is NewConnection
        assert qflow_client.pika.connection.Connection is pika.connection.Connection
