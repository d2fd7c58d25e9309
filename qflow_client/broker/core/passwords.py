"""Hashed passwords: scrypt of the standard library, written ``$scrypt$ln=14,r=8,p=1$SALT$HASH`` (base64, no padding).

If a value in the setting `users` begins with ``$scrypt$``, it is a hash. Any other value is the password itself.
With these parameters, a check takes about 50 ms and 16 MiB, so the broker checks hashes on a separate thread.
"""

from __future__ import annotations

import hmac
import re
from base64 import b64decode, b64encode
from hashlib import scrypt
from secrets import token_bytes

__all__ = ["check_hash", "hash_password", "is_hash", "matches"]

_PREFIX = "$scrypt$"
_HASH = re.compile(r"\$scrypt\$ln=(\d{1,2}),r=(\d{1,2}),p=(\d{1,2})\$([A-Za-z0-9+/]{8,88})\$([A-Za-z0-9+/]{22,88})")
# Maximum memory that the parameters of a hash may require, in bytes.
_MAX_MEMORY = 256 * 1024 * 1024


def is_hash(password: str) -> bool:
    """Whether a value is a hash and not a password."""
    return password.startswith(_PREFIX)


def hash_password(password: str) -> str:
    """Return a hash of a password with a new salt, for the setting `users`. Every login with a blank password fails."""
    salt = token_bytes(16)
    digest = scrypt(password.encode(), salt=salt, n=1 << 14, r=8, p=1, maxmem=_MAX_MEMORY, dklen=32)
    return f"{_PREFIX}ln=14,r=8,p=1${_text(salt)}${_text(digest)}"


def check_hash(hashed: str) -> None:
    """Raise `ValueError` if a hash cannot be used. The text of the error does not contain the hash."""
    _parse(hashed)


def matches(hashed: str, password: bytes) -> bool:
    """Whether a password matches a hash. The check releases the GIL."""
    n, r, p, salt, digest = _parse(hashed)
    found = scrypt(password, salt=salt, n=n, r=r, p=p, maxmem=2 * _MAX_MEMORY, dklen=len(digest))
    return hmac.compare_digest(found, digest)


def _parse(hashed: str) -> tuple[int, int, int, bytes, bytes]:
    found = _HASH.fullmatch(hashed)
    if found is None:
        raise ValueError(
            f"a hash must have the form {_PREFIX}ln=14,r=8,p=1$SALT$HASH; make one with `qflow hash-password`"
        )
    ln, r, p = map(int, found.groups()[:3])
    if not (1 <= ln <= 24 and r and 1 <= p <= 4) or 128 * r << ln > _MAX_MEMORY:
        raise ValueError(f"a hash may need at most {_MAX_MEMORY >> 20} MiB, and p must be at most 4")
    try:
        return 1 << ln, r, p, _bytes(found[4]), _bytes(found[5])
    except ValueError:
        raise ValueError(
            "the salt and the digest of a hash must be base64; make a hash with `qflow hash-password`"
        ) from None


def _text(raw: bytes) -> str:
    return b64encode(raw).decode().rstrip("=")


def _bytes(text: str) -> bytes:
    return b64decode(text + "=" * (-len(text) % 4), validate=True)
