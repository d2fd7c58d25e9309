"""Runs ``qflow`` as ``python -m qflow_client.cli``, for installations without the command."""

from __future__ import annotations

import sys

from qflow_client.cli import main

if __name__ == "__main__":
    sys.exit(main())
