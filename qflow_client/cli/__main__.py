"""Makes ``python -m qflow_client.cli`` run ``qflow``, for systems that do not find the command ``qflow``."""

from __future__ import annotations

import sys

from qflow_client.cli import main

if __name__ == "__main__":
    sys.exit(main())
