"""Imported by what runs many commands: what each of them would do anew is done once."""

from __future__ import annotations

import encodings.idna  # noqa: F401  # what the first connection imports
from functools import cache

import typer.main

import qflow_client.broker.store
import qflow_client.cli.demo.actors  # noqa: F401  # what commands import when they need it
from qflow_client.cli.app import app

# Typer makes the commands from their signatures for every call, which takes longer than most of them.
typer.main.get_command = cache(typer.main.get_command)
typer.main.get_command(app)
