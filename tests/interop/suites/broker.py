"""Runs `qflow broker` under the name of RabbitMQ. With other names, the suites skip some tests."""

from __future__ import annotations

import sys

from qflow_client.broker.core.profiles import DIALECTS, Profile
from qflow_client.cli import main

if __name__ == "__main__":
    properties = DIALECTS[Profile.QFLOW].properties
    assert isinstance(properties, dict)
    properties["product"] = "RabbitMQ"
    sys.exit(main(["broker", "--port", "0"]))
