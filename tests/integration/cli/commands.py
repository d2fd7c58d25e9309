"""Prepares a process that runs many commands: it imports their modules, and creates the commands once."""

from __future__ import annotations

import encodings.idna  # noqa: F401  # the first connection imports it
from functools import cache

import typer.main

import qflow_client.broker.store.store
import qflow_client.cli.demo.actors  # noqa: F401  # commands import it when they need it
from qflow_client.cli.app import app

# Typer creates the commands from their signatures in every call. This takes longer than most commands.
typer.main.get_command = cache(typer.main.get_command)
typer.main.get_command(app)

_PROGRAM = """
import sys
import qflow_client.cli.outbox, qflow_client.cli.sending
qflow_client.cli.outbox._GRACE = qflow_client.cli.sending._GRACE = {}
sys.exit(qflow_client.cli.main())
"""
# Programs like `qflow`. At its end, BRIEF waits only 0.1 s for missing confirms, and PATIENT waits 20 s.
BRIEF, PATIENT = map(_PROGRAM.format, (0.1, 20.0))
