"""Makes ``python -m qflow_client.cli`` run ``qflow``, for systems where ``qflow`` is not on the path."""

from __future__ import annotations

import sys

from qflow_client.cli import main

if __name__ == "__main__":
    sys.exit(main())
