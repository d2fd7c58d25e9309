"""Checks the token of requests, and protects the API from pages of other web sites in a user's browser."""

from __future__ import annotations

import hmac
from http import HTTPStatus
from urllib.parse import urlsplit

from aiohttp import web

from qflow_client.broker.core.settings import is_loopback
from qflow_client.broker.http.problems import Problem
from qflow_client.broker.settings import BrokerSettings

__all__ = ["SAFE_HEADERS", "check_origin", "check_token", "has_token"]

#: Headers of the API's responses. For example, they forbid browsers to cache the response or to guess its content type.
SAFE_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_CHANGE_NOTHING = frozenset({"GET", "HEAD", "OPTIONS"})


def check_origin(request: web.BaseRequest, settings: BrokerSettings) -> None:
    """Raise `Problem` 403 if another origin requests a change, or if no token is set and ``Host`` is not local."""
    host = request.headers.get("Host", "")
    if settings.http_token is None and not _is_local(host, settings):
        # DNS rebinding: the host name of an attacker's page resolves to this machine, so the page has the API's origin.
        raise Problem(
            HTTPStatus.FORBIDDEN,
            f"Host: {host!r} does not name this machine; use localhost or a loopback address, or set http_token",
        )
    if request.method in _CHANGE_NOTHING:
        return
    origin = request.headers.get("Origin")
    if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
        raise Problem(
            HTTPStatus.FORBIDDEN,
            f"Origin: {origin!r} is another origin than {host!r}; only the broker's own pages may change something",
        )
    site = request.headers.get("Sec-Fetch-Site", "none")
    if site not in ("none", "same-origin"):
        raise Problem(
            HTTPStatus.FORBIDDEN,
            f"Sec-Fetch-Site: {site!r} is not 'same-origin' or 'none'; only the broker's own pages may change "
            "something",
        )


def _is_local(host: str, settings: BrokerSettings) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    return is_loopback(name) or name == settings.http_host.lower()


def has_token(request: web.BaseRequest, settings: BrokerSettings) -> bool:
    """Return True if a request has the token, or if the broker needs no token."""
    if settings.http_token is None:
        return True
    scheme, _, shown = request.headers.get("Authorization", "").partition(" ")
    # Compare bytes, because `compare_digest` accepts only ASCII characters in a str.
    right = hmac.compare_digest(shown.strip().encode(errors="replace"), settings.http_token.encode())
    return scheme.lower() == "bearer" and right


def check_token(request: web.BaseRequest, settings: BrokerSettings) -> None:
    """Raise `Problem` 401 if the token of a request is missing or wrong."""
    if not has_token(request, settings):
        raise Problem(
            HTTPStatus.UNAUTHORIZED, "the token is missing or wrong; send the header Authorization: Bearer TOKEN"
        )
