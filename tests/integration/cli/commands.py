"""Imported by what runs many commands: what each of them would do anew is done once."""

from __future__ import annotations

import encodings.idna  # noqa: F401  # what the first connection imports
from functools import cache

import typer.main

import qflow_client.broker.store.store
import qflow_client.cli.demo.actors  # noqa: F401  # what commands import when they need it
from qflow_client.cli.app import app

# Typer makes the commands from their signatures for every call, which takes longer than most of them.
typer.main.get_command = cache(typer.main.get_command)
typer.main.get_command(app)

# A program that is `qflow`, and waits hardly at all in the end for confirms that do not come.
BRIEF = """
import sys
import qflow_client.cli.outbox, qflow_client.cli.sending
qflow_client.cli.outbox._GRACE = qflow_client.cli.sending._GRACE = 0.1
sys.exit(qflow_client.cli.main())
"""
