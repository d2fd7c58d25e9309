from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from dataclasses import dataclass, fields
from functools import partialmethod
from importlib.util import find_spec
from pathlib import Path

import pytest
from celery import Celery
from sqlalchemy import Engine

from qflow_client import ProducerSettings
from qflow_client.broker import Broker

ROOT = Path(__file__).parents[3]
# Pages whose blocks run one after the other, as one program.
PAGES = [
    path
    for path in (
        ROOT / "README.md",
        ROOT / "docs" / "index.md",
        ROOT / "docs" / "quickstart.md",
        ROOT / "docs" / "concepts.md",
        ROOT / "docs" / "broker.md",
        ROOT / "docs" / "reliability.md",
        ROOT / "docs" / "outbox-database.md",
        ROOT / "docs" / "migrate-pika.md",
        ROOT / "docs" / "migrate-celery.md",
        ROOT / "docs" / "migrate-dramatiq.md",
        ROOT / "docs" / "migrate-taskiq.md",
        ROOT / "docs" / "migrate-faststream.md",
        ROOT / "docs" / "dialects.md",
        ROOT / "docs" / "reference" / "qflow_client.flow.md",
        ROOT / "docs" / "reference" / "qflow_client.md",
    )
    if path.exists()
]
# Without the scheme, because some pages have qflow:// for Celery.
DEFAULT_ADDRESS = "://guest:guest@localhost:5672/%2F"

_BLOCK = re.compile(r'^```python(?: title="(?P<title>[^"]+)")?\n(?P<code>.*?)^```$', re.DOTALL | re.MULTILINE)
# Durations in seconds, which are different in each run.
_PLUGIN = ("-p", "qflow_client.testing.plugin")
# Libraries of others: the file on the page about testing that needs each library.
_OTHERS = {"pytest_asyncio.plugin": "test_with_pytest_asyncio.py", "anyio.pytest_plugin": "test_with_anyio.py"}
_TOOK = re.compile(r"\b\d+(?:\.\d+)?(?:e-\d+)? s\b")
_PRINTED = re.compile(r"\n*```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Snippet:
    line: int
    title: str | None
    code: str
    # The output that the page shows. None if it shows none.
    prints: str | None


def snippets(page: Path) -> list[Snippet]:
    text = page.read_text(encoding="utf-8")
    found = []
    for block in _BLOCK.finditer(text):
        printed = _PRINTED.match(text, block.end())
        line = text.count("\n", 0, block.start("code"))
        found.append(Snippet(line, block["title"], block["code"], printed[1] if printed else None))
    return found


def with_address(code: str, broker: Broker) -> str:
    """Return the code with the address of this broker."""
    return code.replace(DEFAULT_ADDRESS, broker.url.removeprefix("amqp"))


def test_python_snippets_are_found_on_the_quickstart_page() -> None:
    assert len(snippets(ROOT / "docs" / "quickstart.md")) > 5


@pytest.mark.usefixtures("no_settings_from_outside")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_blocks_of_each_documentation_page_run_and_print_the_shown_output(
    page: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # By default, Celery adds a task also to all applications that the process creates later, here those of other tests.
    monkeypatch.setattr(Celery, "task", partialmethod(Celery.task, shared=False))
    with Broker() as broker:
        if page.name != "README.md":
            # The first program of the page runs unchanged with an empty broker.
            broker.declare_queue("orders")
        names: dict[str, object] = {"__name__": "__main__"}
        for snippet in snippets(page):
            if snippet.title is not None:
                continue
            # Empty lines before the code, so that a traceback names the line of the page.
            code = "\n" * snippet.line + with_address(snippet.code, broker)
            exec(compile(code, str(page), "exec"), names)
            printed = capsys.readouterr().out
            if snippet.prints is not None:
                wanted, found = (_TOOK.sub("0 s", text) for text in (snippet.prints, printed))
                if not doctest.OutputChecker().check_output(wanted, found, doctest.ELLIPSIS):
                    pytest.fail(f"{page.name}, line {snippet.line} printed\n{printed}\nbut it says\n{snippet.prints}")
        for each in names.values():
            if isinstance(each, Engine):
                # An application keeps its database engine until it ends.
                each.dispose()
            elif isinstance(each, Celery):
                each.close()
                # Celery's pools leave their connections open.
                each.pool.force_close_all()


_POST = """
import django
django.setup()
from django.test import RequestFactory
from shop.views import order
print(order(RequestFactory().post("/", {"number": "1"})).status_code)
"""


@pytest.mark.program
def test_the_django_view_on_the_page_about_celery_sends_a_task(tmp_path: Path) -> None:
    pytest.importorskip("django")
    with Broker() as broker:
        for snippet in snippets(ROOT / "docs" / "migrate-celery.md"):
            if snippet.title is not None:
                file = tmp_path / snippet.title
                file.parent.mkdir(exist_ok=True)
                file.write_text(with_address(snippet.code, broker), encoding="utf-8")
        environment = _environment() | {"DJANGO_SETTINGS_MODULE": "shop.settings"}
        done = subprocess.run(
            [sys.executable, "-c", _POST], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert (done.stdout, done.stderr) == ("202\n", "")
        assert broker.queue("celery").depth == 1


@pytest.mark.program
def test_the_example_tests_on_the_page_about_testing_pass(tmp_path: Path) -> None:
    files = {snippet.title: snippet.code for snippet in snippets(ROOT / "docs" / "testing.md")}
    assert None not in files, "every block of this page is a file: give it a title"
    if os.environ.get("QFLOW_REQUIRE_BROKERS") != "1":
        # It starts a RabbitMQ node.
        compile(files.pop("test_with_rabbitmq.py"), "test_with_rabbitmq.py", "exec")
    others: list[str] = []
    for plugin, file in _OTHERS.items():
        if find_spec(plugin.partition(".")[0]) or "CI" in os.environ:
            others += ["-p", plugin]
        else:
            del files[file]
    for title, code in files.items():
        assert title is not None
        (tmp_path / title).write_text(code, encoding="utf-8")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            *_PLUGIN,
            *others,
            "--rootdir",
            tmp_path,
            tmp_path,
        ],
        cwd=tmp_path,
        # The test needs only this plugin, and others take seconds to load.
        env=_environment() | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _environment() -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def test_the_table_of_settings_in_the_documentation_is_complete_and_correct() -> None:
    text = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `(.*)` \| `(QFLOW_\w+)` \|$", text, re.MULTILINE)
    assert rows == [
        (
            field.name,
            repr(str(field.default) if isinstance(field.default, str) else field.default),
            f"QFLOW_{field.name.upper()}",
        )
        for field in fields(ProducerSettings)
        if field.metadata
    ]
