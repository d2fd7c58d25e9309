from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
import typer.main

import qflow_client
import qflow_client.cli
from qflow_client.broker import BrokerSettings
from qflow_client.cli import main
from qflow_client.cli.app import app


def test_importing_the_package_does_not_import_the_command_line_or_the_libraries_that_it_uses() -> None:
    code = "import sys, qflow_client.cli; print(sorted({'typer', 'rich', 'qflow_client.cli.app'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_without_the_libraries_of_the_cli_extra_the_command_says_how_to_install_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(qflow_client.cli, "find_spec", lambda name: None if name == "typer" else object())
    assert main(["--version"]) == 1
    assert capsys.readouterr().err == "qflow: the command line needs typer: pip install 'qflow-client[cli]'\n"


def test_the_option_version_prints_the_version_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"qflow {qflow_client.__version__}\n"


@pytest.mark.parametrize(
    "command",
    ["send", "broker", "demo", "outbox", "admin", "admin queues", "admin watch", "admin add queue", "admin set queue"],
)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--help"]) == 0
    assert f"qflow {command}" in capsys.readouterr().out


def _commands(command: Any, *names: str) -> Iterator[tuple[str, Any]]:
    for name, inner in getattr(command, "commands", {}).items():
        yield from _commands(inner, *names, name)
    if names and not hasattr(command, "commands"):
        yield " ".join(names), command


def test_every_command_can_print_json() -> None:
    found = dict(_commands(typer.main.get_command(app)))
    assert {"send", "outbox ls", "admin delete queue"} < found.keys()
    without = [name for name, command in found.items() if all("--json" not in each.opts for each in command.params)]
    assert not without


_PROGRAMS_ONLY = ("authenticate", "ssl_context", "trace")


def test_the_help_of_the_broker_names_the_default_of_every_setting() -> None:
    command = dict(_commands(typer.main.get_command(app)))["broker"]
    found = {option.name: re.search(r"\(default: ([^,;)]+)[^)]*\)", option.help) for option in command.params}
    told = {name: default[1] for name, default in found.items() if default}
    settings = BrokerSettings(port=5672)
    for field in fields(settings):
        value = getattr(settings, field.name)
        assert {"users": "user", "policies": "policy"}.get(field.name, field.name) in {*told, *_PROGRAMS_ONLY}
        if isinstance(value, str | int | float):
            assert told[field.name] == (f"{value:g}" if isinstance(value, float) else str(value)), field.name
    assert (told["user"], told["loopback_users"]) == ("guest:guest", *settings.loopback_users)


def _contexts(command: Any, name: str, parent: Any = None) -> Iterator[Any]:
    # Click leaves 2 of the 80 columns free.
    context = command.context_class(command, parent=parent, info_name=name, terminal_width=78)
    yield context
    for each, inner in getattr(command, "commands", {}).items():
        yield from _contexts(inner, each, context)


def test_the_help_of_commands_shows_all_defaults_in_the_same_form_and_no_shortened_names() -> None:
    for context in _contexts(typer.main.get_command(app), "qflow"):
        command, name = context.command, context.command_path
        _usage, *lines = command.get_help(context).splitlines()
        # Typer cuts the descriptions in a list of commands with "...", and wraps lines at hyphens.
        assert [line for line in lines if re.search(r"\.\.\.$|\w-$|\[default", line)] == [], name
        for option in command.params:
            if not isinstance(option.default, bool | None) and not option.required:
                default = f"{option.default:g}" if isinstance(option.default, float) else str(option.default)
                assert f"(default: {default}" in option.help, (name, option.name)


@pytest.mark.parametrize("command", ["send", "broker", "demo"])
def test_the_help_of_each_command_fits_into_80_columns(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {}
    for columns in (80, 400):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert main([command, "--help"]) == 0
        said[columns] = capsys.readouterr().out
    out = said[80]
    assert max(map(len, out.splitlines())) <= 80
    # The texts contain hyphens.
    assert out.count("…") == said[400].count("…")
    for name in {"send": ["--max-producer-flow-control-wait", "amqp://user:password@host:port/vhost"]}.get(command, []):
        assert name in out


def test_an_unknown_command_line_option_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["send", "--nothing"]) == 2
    assert "--nothing" in capsys.readouterr().err


def test_without_standard_error_an_error_is_not_printed_to_standard_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["report", "no-such-file"]) == 1
    assert capsys.readouterr().out == ""


def test_output_that_cannot_be_written_is_a_failure_and_is_not_written_again_at_exit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed_pipe:
        monkeypatch.setattr(sys, "stdout", closed_pipe)
        assert main(["--version"]) == 1


def test_the_option_debug_shows_the_traceback_of_an_error() -> None:
    with pytest.raises(FileNotFoundError):
        main(["--debug", "send", "no-such-file", "-k", "q"])
