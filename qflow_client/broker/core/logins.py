"""Logins, sans-I/O: the mechanisms PLAIN and AMQPLAIN, the users, and delays after failed logins.

Only the function `authenticate` of the settings can accept a blank password. Without this function, the time of a
failed login does not show whether the user exists, if all hashes have the same parameters.

`Logins` checks passwords. If the settings have only a hash of a password, the server checks the password on a thread.
`Logins` remembers a keyed digest of a right password, so a client that reconnects does not wait for the hash again. A
running check counts as a failed login, so one address cannot have many checks at the same time.

`FailedLogins` slows down guessing. After several failed logins from an address, further logins from this address are
delayed to about one per second. The delay is the same for right and wrong passwords.
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

#: The mechanisms for ``Connection.Start``, in this order: many clients use the first mechanism that they support.
MECHANISMS = "PLAIN AMQPLAIN"


class Login(NamedTuple):
    """The data of a login."""

    mechanism: str
    user: str
    password: bytes

    def __repr__(self) -> str:
        return f"Login({self.mechanism!r}, {self.user!r})"


def read_login(mechanism: str, response: str | bytes) -> Login | None:
    """Return the login in a ``Connection.Start-Ok``; ``None`` if the broker does not offer the mechanism.

    Raises:
        ConnectionException: 502 if the response does not fit the mechanism.
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
    """Read a login from the encoded fields of a table. AMQPLAIN does not send the table's size."""
    try:
        fields = decode_table(len(raw).to_bytes(4, "big") + raw, 0)[0]
    except UNDECODABLE:
        # Raise the `ConnectionException` later and not here, because a chained error could quote the password.
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
        authenticate: called for each login instead of using `users`; ``None`` to use `users`.
    """

    def __init__(
        self, users: Mapping[str, str], failed: FailedLogins, authenticate: Authenticate | None = None
    ) -> None:
        self._users = users
        self._failed = failed
        self._authenticate = authenticate
        # Hash that is checked if the user is unknown or a plain password is wrong, so that failures take equally long.
        self._nobody = next(filter(is_hash, users.values()), "")
        # Keyed digest of the last right password of each user with a hashed password.
        self._right: dict[str, bytes] = {}
        self._key = token_bytes(32)
        #: Calls the first function (about 50 ms), then the second with the result. The server's `run` uses a thread.
        self.run: Callable[[Callable[[], bool], Callable[[bool], None]], object] = _run

    def check(self, login: Login, address: str, now: float, done: Callable[[float], None]) -> None:
        """Check the user and password of a login. A failed login is counted.

        Args:
            now: monotonic seconds.
            done: called now or later, with the number of seconds for which the login is valid; 0 for a wrong login.
        """
        if self._authenticate is not None:
            valid_for = self.renewed_for(login.user, login.password)
            if not valid_for:
                self._failed.failed(address, now)
            done(valid_for)
            return
        password = self._users.get(login.user, "")
        is_known = login.user in self._users and bool(login.password)
        if not is_hash(password):
            # Also compare for unknown users, so that the time of a failed login does not show whether the user exists.
            is_right = hmac.compare_digest(password.encode(), login.password) and is_known
            if is_right or not self._nobody:
                if not is_right:
                    self._failed.failed(address, now)
                done(_valid(is_right))
                return
            password, is_known = self._nobody, False
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
        """Return for how many seconds a user's secret is valid from now on; 0 for a wrong secret.

        Without `authenticate` the secret is not checked (as in RabbitMQ), because the connection is already open.
        """
        if self._authenticate is None:
            return math.inf
        return self._authenticate(user, secret.decode(errors="replace"))


def _valid(is_right: bool) -> float:
    return math.inf if is_right else 0.0


def _run(function: Callable[[], bool], done: Callable[[bool], None]) -> None:
    done(function())


def login_refusal(login: Login, loopback_users: Collection[str], address: str, *, is_right: bool) -> str | None:
    """Return the reason why a login is refused; ``None`` if it is accepted.

    Args:
        loopback_users: users that may log in only from this machine.
        address: address of the client; empty if it has none, for example on a Unix socket.
    """
    if not is_right:
        return f"login of user {login.user!r} was refused using {login.mechanism}; check user and password"
    if login.user in loopback_users and address and not is_loopback(address):
        return f"user {login.user!r} can only connect via localhost (loopback_users); log in as another user"
    return None


def _network(address: str) -> str:
    """Return the key under which failed logins are counted: an IPv4 address, or the /64 network of an IPv6 address."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv6Address):
        return str(ip.ipv4_mapped or ipaddress.ip_network((int(ip) >> 64 << 64, 64)))
    return str(ip)


class FailedLogins:
    """Delays logins from addresses that had failed logins.

    Args:
        burst: number of failed logins of an address before further logins are delayed; 0 to delay none.
    """

    #: Seconds after which one failed login of an address is forgotten.
    INTERVAL = 1.0
    #: Maximum delay of a login, in seconds.
    MAX_DELAY = 5.0
    #: Maximum number of addresses. If there are more, the address whose last failure is the oldest is forgotten.
    MAX_ADDRESSES = 4096

    def __init__(self, burst: int) -> None:
        self._burst = burst
        # Addresses in the order of their last failed logins, each with the time at which its last failure is forgotten.
        self._clear_at: dict[str, float] = {}

    def delay(self, address: str, now: float) -> float:
        """Return the seconds that a login has to wait before it is checked. `now` is in monotonic seconds."""
        clear_at = self._clear_at.get(_network(address)) if self._clear_at else None
        return 0.0 if clear_at is None else max(0.0, clear_at - now - self._burst * self.INTERVAL)

    def failed(self, address: str, now: float) -> None:
        if not self._burst:
            return
        key = _network(address)
        clear_at = max(self._clear_at.pop(key, now), now) + self.INTERVAL
        self._clear_at[key] = min(clear_at, now + self._burst * self.INTERVAL + self.MAX_DELAY)
        if len(self._clear_at) > self.MAX_ADDRESSES:
            del self._clear_at[next(iter(self._clear_at))]

    def forgive(self, address: str) -> None:
        """Forget the failed login that `Logins.check` counted before the check, because the password is right."""
        key = _network(address)
        if key in self._clear_at:
            self._clear_at[key] -= self.INTERVAL
