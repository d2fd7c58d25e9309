"""Sets the variables of OpenSSL and Go for trusted certificate authorities, so that the tests trust no authority."""

from __future__ import annotations

import os

__all__ = ["TRUSTED", "trust_nobody"]

_VARIABLES = ("SSL_CERT_FILE", "SSL_CERT_DIR")

#: The environment without `trust_nobody`, for programs that download. ``None`` if a variable was not set.
TRUSTED = {name: None if os.environ.get(name) == os.devnull else os.environ.get(name) for name in _VARIABLES}


def trust_nobody() -> None:
    """Load no certificates of the system. No test needs them, and an SSL context takes 55 ms to load them."""
    for name in _VARIABLES:
        os.environ[name] = os.devnull
