"""Reads the configuration file of ``qflow broker``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from qflow_client.broker import BrokerSettings, Policy, PolicyDefinition
from qflow_client.cli.errors import CommandError, ExitCode

__all__ = ["MARKS", "SETTINGS", "TLS_FILES", "Config", "read_config"]

#: Settings of the broker that a configuration file can have. Only Python programs can set the other settings.
SETTINGS = tuple(
    field.name for field in fields(BrokerSettings) if field.name not in ("authenticate", "ssl_context", "trace")
)
_WORDS = tuple(name for name in SETTINGS if name != "policies")
#: Names of the thresholds that a table ``[[queue]]`` can have.
MARKS = ("flow_stop_count", "flow_resume_count", "flow_stop_size", "flow_resume_size")
# Keys of a table ``[[policy]]``, except the name of the policy and the keys of its definition.
_POLICY = ("pattern", "apply_to", "routing_key", "priority")
#: Names of the options that together make the setting `ssl_context`.
TLS_FILES = ("tls_certificate", "tls_key", "tls_client_ca")
_FILES = ("flow_log", *TLS_FILES, "store")


@dataclass(frozen=True)
class Config:
    """The contents of a configuration file.

    Attributes:
        settings: names and values of the broker's settings, and of `tls_certificate`, `tls_key` and `tls_client_ca`.
            The value of `flow_log` is the path of a folder, not a `FlowLog`.
        queues: thresholds of each queue to declare at the start, by the queue's name.
    """

    path: Path | None
    settings: Mapping[str, Any]
    queues: Mapping[str, Mapping[str, int]]


def read_config(path: Path | None) -> Config:
    """Read a configuration file. Without a path the configuration is empty.

    Raises:
        CommandError: the file is not TOML, an option is unknown, or a path, queue or policy is invalid.
        OSError: the file cannot be read.
    """
    if path is None:
        return Config(None, {}, {})
    try:
        told = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise _refused(path, f"the file is not valid TOML: {error}") from error
    queues: dict[str, Mapping[str, int]] = {}
    for number, table in enumerate(_tables(path, told, "queue"), 1):
        _check_names(path, f"[[queue]] number {number}: ", table, ("name", *MARKS))
        name = table.pop("name", None)
        if not isinstance(name, str) or not name:
            raise _refused(path, f"[[queue]] number {number}: name must be the name of a queue, not {name!r}")
        if name in queues:
            raise _refused(
                path, f"[[queue]] number {number}: the name {name!r} is used twice; give each queue its own name"
            )
        queues[name] = table
    policies = [_policy(path, number, table) for number, table in enumerate(_tables(path, told, "policy"), 1)]
    _check_names(path, "", told, (*_WORDS, *_FILES, "queue", "policy"))
    if policies:
        told["policies"] = policies
    for name in _FILES:
        # Relative paths in the file are relative to the folder of the file.
        if name in told:
            if not isinstance(told[name], str):
                raise _refused(path, f"{name} must be a path, not {told[name]!r}")
            told[name] = path.parent / told[name]
    return Config(path, told, queues)


def _tables(path: Path, told: dict[str, Any], name: str) -> list[dict[str, Any]]:
    tables = told.pop(name, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise _refused(path, f"{name} must be a list of tables; begin each table with [[{name}]]")
    return tables


def _policy(path: Path, number: int, table: dict[str, Any]) -> Policy:
    try:
        own = {name: table.pop(name) for name in _POLICY if name in table}
        return Policy(table.pop("name", None), PolicyDefinition.from_mapping(table), **own)
    except (TypeError, ValueError) as error:
        raise _refused(path, f"[[policy]] number {number}: {error}") from error


def _check_names(path: Path, where: str, told: Mapping[str, object], known: tuple[str, ...]) -> None:
    for name in told:
        if name not in known:
            near = get_close_matches(name.replace("-", "_"), known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; the options are {', '.join(dict.fromkeys(known))}"
            raise _refused(path, f"{where}there is no option {name!r}{hint}")


def _refused(path: Path, text: str) -> CommandError:
    return CommandError(f"{path}: {text}", ExitCode.USAGE)
