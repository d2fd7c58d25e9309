"""Removes passwords from values that errors, reprs and logs show.

Errors show a value as `shown(value)`, and a broker as `hide_password(url)`. Both functions hide each part of a URL that
may be secret. If the name of a query parameter is unknown, the parameter's value is hidden. For a value of an unknown
type, `shown` shows only the type. If a library's error about a URL may show secrets, `words_of` leaves out its text.

A text that looks neither like a URL nor like credentials is shown. So the secret in ``name="s3cr3t"`` is not hidden.
"""

from __future__ import annotations

import ast
import os
import re
import string
from dataclasses import dataclass
from enum import Enum
from numbers import Number
from typing import Any
from urllib.parse import unquote, unquote_plus

__all__ = [
    "HARMLESS",
    "censored",
    "hide_password",
    "is_clear",
    "is_harmless",
    "is_url",
    "printable",
    "shown",
    "shown_of_unknown",
    "words_of",
]

#: The names of query parameters whose values may be shown. The module `settings` adds the names of settings.
HARMLESS = {
    # Parameters of pika.
    "blocked_connection_timeout",
    "channel_max",
    "connection_attempts",
    "frame_max",
    "heartbeat",
    "locale",
    "retry_delay",
    "socket_timeout",
    "stack_timeout",
    # Parameters of aio-pika.
    "auth",
    "cadata",
    "cafile",
    "capath",
    "certfile",
    "fail_fast",
    "happy_eyeballs_delay",
    "interleave",
    "keyfile",
    "name",
    "no_verify_ssl",
    "reconnect_interval",
    "timeout",
}

# The keys of pika's ``ssl_options`` whose values may be shown. The password of the private key must not be shown.
_SSL_HARMLESS = {
    "ca_certs",
    "ca_path",
    "cafile",
    "capath",
    "certfile",
    "ciphers",
    "keyfile",
    "server_hostname",
}

_HIDDEN = "***"
# The characters of a URL's scheme.
_SCHEME_LETTERS = string.ascii_letters + string.digits + "+.-"
# The authority, the path, and the query of a URL.
_URL = re.compile(r"([^/?#]*)([^?]*)(?:\?(.*))?", re.DOTALL)
# A host, its port, and any text that follows the URL.
_HOST = re.compile(r"(\[[^\]@]*\]?|[^:@\[\]]*)(:\d*((:?\s|['\"),;\]]).*)?)?", re.DOTALL)
# The beginning of a URL. One slash is enough, because `Path` changes // to /. A single letter would be a drive (c:/).
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
# The separator between user and password, which may be encoded by mistake.
_COLON = re.compile(":|%3a", re.IGNORECASE)
# Quotes and brackets that may follow a URL in a text.
_CLOSING = "'\")]"
# Characters that begin another URL or another parameter inside a value. A harmless value does not contain them.
_FOREIGN = re.compile("://|[;=]")
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
# Number of levels of a nested value that are shown, and maximum number of characters of a shown value.
_DEPTH = 3
_LONGEST = 1000


@dataclass(frozen=True)
class _Censored:
    """The harmless text that replaces a text with a URL, and the secrets that were removed.

    Attributes:
        is_clear: whether the beginning and end of the secrets are certain.
    """

    text: str
    secrets: tuple[str, ...]
    is_clear: bool


def _censor(text: str) -> _Censored:
    # Search with `find`, because a regular expression would need quadratic time for a long text.
    colon_at = text.find(":/")
    begin = colon_at + (3 if text.startswith("//", colon_at + 1) else 2)
    # There is no URL, or `Path` has changed the // of the URL to /.
    if colon_at < 0 or (begin - colon_at == 2 and "@" in text):
        return _Censored(_hide_credentials(text), (), ":" not in text)
    scheme_at = len(text[:colon_at].rstrip(_SCHEME_LETTERS))
    before, scheme = _hide_credentials(text[:scheme_at]), text[scheme_at:begin]
    found = _URL.fullmatch(text, begin)
    assert found is not None
    authority, path, query = found.groups()
    user, at, host = authority.rpartition("@")
    name, colon, password = user.partition(":")
    is_encoded = not colon and _COLON.search(user) is not None
    shown_query, secrets, has_at = _censor_query(query or "")
    has_at = has_at or (not at and ":" in authority and "@" in (query or ""))
    if "@" in path or has_at or is_encoded or not _HOST.fullmatch(host) or ("#" in path and ":" in authority):
        # The end of the password is uncertain: the password contains a / ? or #, the colon before it is encoded, or the
        # host is missing. So all text before the last @ may belong to the password.
        hidden, at, tail = text[begin:].rpartition("@")
        name, *colon = _COLON.split(authority, maxsplit=1)
        host, mark, query = tail.partition("?") if at else ("", "", "")
        if not at or not _HOST.fullmatch(host.partition("/")[0]):
            host = _HIDDEN if at else ""
        shown_query, *_ = _censor_query(query)
        credentials = (f"{name}:{_HIDDEN}" if colon else _HIDDEN) + at
        closing = "" if at else text[len(text.rstrip(_CLOSING)) :]
        return _Censored(
            f"{before}{scheme}{credentials}{host}{mark}{shown_query}{closing}",
            (hidden or tail,),
            is_clear=False,
        )
    credentials = f"{name}:{_HIDDEN}@" if colon else user + at
    mark = "" if query is None else "?"
    return _Censored(
        f"{before}{scheme}{credentials}{host}{path}{mark}{shown_query}", (password, *secrets), is_clear=True
    )


def _hide_credentials(text: str) -> str:
    begin, end = text.find(":"), text.rfind("@")
    return f"{text[: begin + 1]}{_HIDDEN}{text[end:]}" if 0 <= begin < end else text


def _censor_query(query: str) -> tuple[str, list[str], bool]:
    """Return a query's harmless text, the removed parts, and whether the query may contain the end of a password."""
    texts, secrets, has_at = [], [], False
    for parameter in query.split("&"):
        name, equals, value = parameter.partition("=")
        if name == "ssl_options" and (options := _ssl_options(value)):
            texts.append(
                f"{name}={ {key: each if key in _SSL_HARMLESS else _HIDDEN for key, each in options.items()} }"
            )
            secrets.append(value)
            secrets += [str(each) for key, each in options.items() if key not in _SSL_HARMLESS]
        elif not parameter or (equals and is_harmless(name, unquote_plus(value))):
            texts.append(parameter)
        else:
            texts.append(f"{name}={_HIDDEN}" if equals and _NAME.fullmatch(name) else _HIDDEN)
            secrets.append(value or parameter)
            has_at = has_at or "@" in parameter
    return "&".join(texts), secrets, has_at


def is_harmless(name: str, value: str) -> bool:
    """Return True if the value of a parameter in a URL's query may be shown."""
    # A value with a ; is not harmless, because some programs treat a ; like an &.
    return name in HARMLESS and not _FOREIGN.search(value) and _hide_credentials(value) == value


def is_url(path: object) -> bool:
    """Return True if the value of an argument for a path is a URL."""
    return isinstance(path, (str, os.PathLike)) and _SCHEME.match(os.fsdecode(path)) is not None


def _ssl_options(text: str) -> dict[Any, Any]:
    """Parse pika's ``ssl_options``. Return an empty dict if the text is invalid."""
    try:
        options = ast.literal_eval(unquote_plus(text))
    except (MemoryError, RecursionError, SyntaxError, TypeError, ValueError):
        return {}
    return options if isinstance(options, dict) else {}


def hide_password(url: str) -> str:
    """Replace possible secrets in a URL by ``***``: the password, and unknown parameters of the query.

    Args:
        url: a URL. A text that is not a URL is returned unchanged if it does not seem to contain credentials.
    """
    return _censor(url).text


def shown(value: object) -> str:
    """Return a text that errors can show: a number, a name, a URL without passwords, or the type of another value."""
    text = _text_of(value, _DEPTH)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text):,} characters)"


def _text_of(value: object, depth: int) -> str:
    if isinstance(value, Enum):
        # Show the name, because the value of an enumeration may be a URL.
        return f"{type(value).__name__}.{value.name}"
    if value is None or isinstance(value, Number):
        return repr(value)
    if isinstance(value, str):
        return repr(hide_password(value))
    if isinstance(value, (bytes, bytearray)):
        return hide_password(repr(bytes(value)))
    if isinstance(value, os.PathLike):
        return _text_of(os.fspath(value), depth)
    if type(value) in (list, tuple) and depth:
        texts = ", ".join(_text_of(each, depth - 1) for each in value)  # type: ignore[attr-defined]  # a list or a tuple
        return f"[{texts}]" if isinstance(value, list) else f"({texts})"
    if type(value) is dict and depth:
        return "{" + ", ".join(f"{_text_of(key, 0)}: {shown_of_unknown(each)}" for key, each in value.items()) + "}"
    return type.__repr__(value) if isinstance(value, type) else f"<{type(value).__name__} object>"


def shown_of_unknown(value: object) -> str:
    """Return a text for the value of an argument with an unknown name. Values that may be passwords are hidden."""
    return repr(value) if value is None or isinstance(value, bool) else _HIDDEN


def is_clear(url: str) -> bool:
    """Return True if the beginning and end of the password in a URL are certain."""
    return _censor(url).is_clear


def censored(error: Exception, url: object) -> Exception:
    """Return an error of a library, or a replacement if the error shows secrets of a URL.

    Raise the result outside the exception handler. Inside, Python would store the original error in ``__context__``.
    """
    if not isinstance(url, str) or not _repeats_secret(error, url):
        return error
    return ValueError(f"url={shown(url)}: {words_of(error, url)}")


def words_of(error: BaseException, url: str) -> str:
    """Return a library's error text about a URL, or a replacement if the text shows secrets of the URL."""
    if _repeats_secret(error, url):
        return f"{type(error).__name__} (its text is left out, because it may contain a secret)"
    return str(error)


def _repeats_secret(error: BaseException, url: str) -> bool:
    """Return True if the text of an error or of its causes may contain secrets that `hide_password` hides in `url`."""
    found = _censor(url)
    parts = {part for secret in found.secrets for part in (secret, unquote(secret), unquote_plus(secret)) if part}
    each: BaseException | None = error
    while each is not None and found.is_clear:
        # A traceback with a `SyntaxError` also shows the line of source in the attribute `text`.
        text = f"{each} {getattr(each, 'text', None)}"
        # Since Python 3.14, the error for malformed ``ssl_options`` shows them in another form.
        if "malformed node" in text or any(part in text or repr(part)[1:-1] in text for part in parts):
            return True
        each = each.__cause__ or each.__context__
    return not found.is_clear


def printable(text: str, keep: str = "") -> str:
    """Replace control characters, which a terminal would execute, by Python's escapes. Characters in `keep` stay."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in keep else each.encode("unicode_escape").decode("ascii") for each in text
    )
