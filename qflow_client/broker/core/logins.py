"""Logins, sans-I/O: the mechanisms PLAIN and AMQPLAIN, which users may log in from where, and failed logins slowed.

A login takes as long for a user that does not exist as for a wrong password. A blank password is always refused.
`Logins` checks passwords. One that is hashed in the settings is checked where `run` runs it, which for a broker is a
thread. A right one is remembered under a key that lives as long as the broker, so a client that comes back does not
wait for the hash again. A check that goes on counts as a failed login, so one address cannot have many at once.
`FailedLogins` makes guessing slow: once an address has failed often, each further login from it is checked only when
its turn comes, about one in a second, and a right password waits as long as a wrong one. Other addresses do not wait.
"""

from __future__ import annotations

import hmac
import ipaddress
import math
from collections.abc import Callable, Collection, Mapping
from secrets import token_bytes
from typing import NamedTuple

from qflow_client.amqp.fields import decode_table
from qflow_client.broker.core.errors import ConnectionException, ReplyCode
from qflow_client.broker.core.passwords import is_hash, matches
from qflow_client.broker.core.settings import Authenticate, is_loopback
from qflow_client.broker.core.wire import UNDECODABLE

__all__ = ["MECHANISMS", "FailedLogins", "Login", "Logins", "login_refusal", "read_login"]

#: The mechanisms, as ``Connection.Start`` names them. Many clients take the first that they know.
MECHANISMS = "PLAIN AMQPLAIN"


class Login(NamedTuple):
    """What a client logs in with.

    Attributes:
        mechanism: by which it was sent.
        user: the name.
        password: as bytes.
    """

    mechanism: str
    user: str
    password: bytes

    def __repr__(self) -> str:
        return f"Login({self.mechanism!r}, {self.user!r})"


def read_login(mechanism: str, response: str | bytes) -> Login | None:
    """The login in a ``Connection.Start-Ok``; ``None`` if its mechanism is not offered.

    Raises:
        ConnectionException: 502; the response is not what the mechanism needs.
    """
    raw = response.encode() if isinstance(response, str) else response
    if mechanism == "PLAIN":
        parts = raw.split(b"\0")
        if len(parts) != 3:
            raise ConnectionException(ReplyCode.SYNTAX_ERROR, "the PLAIN response is not NUL, user, NUL, password")
        return Login(mechanism, parts[1].decode(errors="replace"), parts[2])
    if mechanism == "AMQPLAIN":
        return _read_amqplain(raw)
    return None


def _read_amqplain(raw: bytes) -> Login:
    """A login in a field table without its size."""
    try:
        fields = decode_table(len(raw).to_bytes(4, "big") + raw, 0)[0]
    except UNDECODABLE:
        # Without a context: the error may quote the password.
        fields = {}
    user, password = _raw(fields.get("LOGIN")), _raw(fields.get("PASSWORD"))
    if user is None or password is None:
        raise ConnectionException(
            ReplyCode.SYNTAX_ERROR, "the AMQPLAIN response is not a table with LOGIN and PASSWORD, both long strings"
        )
    return Login("AMQPLAIN", user.decode(errors="replace"), password)


def _raw(value: object) -> bytes | None:
    if isinstance(value, str):
        return value.encode()
    return bytes(value) if isinstance(value, (bytes, bytearray)) else None


class Logins:
    """Checks passwords.

    Args:
        users: passwords or their hashes, by user name.
        failed: counts the logins that failed.
        authenticate: is asked in the place of `users`; ``None`` for those.
    """

    def __init__(
        self, users: Mapping[str, str], failed: FailedLogins, authenticate: Authenticate | None = None
    ) -> None:
        self._users = users
        self._failed = failed
        self._authenticate = authenticate
        # What a user that does not exist is compared with: as slow as the others.
        self._nobody = next(filter(is_hash, users.values()), "")
        # The last right password of each user whose password is hashed, not to be read back.
        self._right: dict[str, bytes] = {}
        self._key = token_bytes(32)
        #: Runs a function that may take 50 ms, and passes on what it returns; here and now unless a server has its own.
        self.run: Callable[[Callable[[], bool], Callable[[bool], None]], object] = _run

    def check(self, login: Login, address: str, now: float, done: Callable[[float], None]) -> None:
        """Find out for how many seconds the user and the password of a login are valid, and count it if they are not.

        Args:
            login: what the client sent.
            address: of the client.
            now: monotonic seconds.
            done: is given the seconds, at once or later; 0 if they are wrong.
        """
        if self._authenticate is not None:
            valid_for = self.renewed_for(login.user, login.password)
            if not valid_for:
                self._failed.failed(address, now)
            done(valid_for)
            return
        password = self._users.get(login.user, self._nobody)
        is_known = login.user in self._users and bool(login.password)
        if not is_hash(password):
            # Compared even if there is no such user, so that the time taken does not tell.
            is_right = hmac.compare_digest(password.encode(), login.password) and is_known
            if not is_right:
                self._failed.failed(address, now)
            done(_valid(is_right))
            return
        mark = hmac.digest(self._key, login.password, "sha256")
        if is_known and hmac.compare_digest(self._right.get(login.user, b""), mark):
            done(math.inf)
            return

        def checked(is_right: bool) -> None:
            if is_right and is_known:
                self._right[login.user] = mark
                self._failed.forgive(address)
            done(_valid(is_right and is_known))

        self._failed.failed(address, now)
        self.run(lambda: matches(password, login.password), checked)

    def renewed_for(self, user: str, secret: bytes) -> float:
        """For how many seconds a user's new secret is valid; 0 if it is wrong.

        As on RabbitMQ with PLAIN it is not looked at, because the connection is open already, unless `authenticate`
        decides.
        """
        if self._authenticate is None:
            return math.inf
        return self._authenticate(user, secret.decode(errors="replace"))


def _valid(is_right: bool) -> float:
    return math.inf if is_right else 0.0


def _run(function: Callable[[], bool], done: Callable[[bool], None]) -> None:
    done(function())


def login_refusal(login: Login, loopback_users: Collection[str], address: str, *, is_right: bool) -> str | None:
    """Why a login is refused; ``None`` if it is not.

    Args:
        login: what the client sent.
        loopback_users: the users that may log in from this machine only.
        address: of the client; empty if it has none, as in a Unix socket.
        is_right: whether its user and password are.
    """
    if not is_right:
        return f"login of user {login.user!r} was refused using {login.mechanism}; check user and password"
    if login.user in loopback_users and address and not is_loopback(address):
        return f"user {login.user!r} can only connect via localhost (loopback_users); log in as another user"
    return None


def _network(address: str) -> str:
    """What failed logins are counted for: an IPv4 address, or the 64 bits of an IPv6 network that one client has."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv6Address):
        return str(ip.ipv4_mapped or ipaddress.ip_network((int(ip) >> 64 << 64, 64)))
    return str(ip)


class FailedLogins:
    """How long logins from each address wait, because of those that failed.

    Args:
        burst: failed logins that an address may have in quick succession; 0 for any number, and nothing waits.
    """

    #: Seconds until one failed login of an address is forgotten.
    INTERVAL = 1.0
    #: The most seconds that a login waits before its next turn.
    MAX_DELAY = 5.0
    #: Addresses that are remembered; beyond that the one that failed longest ago is forgotten.
    MAX_ADDRESSES = 4096

    def __init__(self, burst: int) -> None:
        self._burst = burst
        # When all failed logins of an address are forgotten, the one that failed longest ago first.
        self._clear_at: dict[str, float] = {}

    def delay(self, address: str, now: float) -> float:
        """Seconds that a login from an address has to wait before it is checked; 0 for none.

        Args:
            address: of the client.
            now: monotonic seconds.
        """
        clear_at = self._clear_at.get(_network(address)) if self._clear_at else None
        return 0.0 if clear_at is None else max(0.0, clear_at - now - self._burst * self.INTERVAL)

    def failed(self, address: str, now: float) -> None:
        """A login from an address has failed."""
        if not self._burst:
            return
        key = _network(address)
        clear_at = max(self._clear_at.pop(key, now), now) + self.INTERVAL
        self._clear_at[key] = min(clear_at, now + self._burst * self.INTERVAL + self.MAX_DELAY)
        if len(self._clear_at) > self.MAX_ADDRESSES:
            del self._clear_at[next(iter(self._clear_at))]

    def forgive(self, address: str) -> None:
        """The last login that was counted for an address has not failed."""
        key = _network(address)
        if key in self._clear_at:
            self._clear_at[key] -= self.INTERVAL
