"""The authorities that the tests trust, by the variables of OpenSSL and Go."""

from __future__ import annotations

import os

__all__ = ["TRUSTED", "trust_nobody"]

_VARIABLES = ("SSL_CERT_FILE", "SSL_CERT_DIR")

#: The environment without `trust_nobody`, for programs that download. ``None`` if a variable was not set.
TRUSTED = {name: None if os.environ.get(name) == os.devnull else os.environ.get(name) for name in _VARIABLES}


def trust_nobody() -> None:
    """Load no certificates of the system. No test needs one, and an SSL context would take 55 ms to load them all."""
    for name in _VARIABLES:
        os.environ[name] = os.devnull
