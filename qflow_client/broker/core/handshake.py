"""The opening of one connection, sans-I/O: the login, and the negotiation before ``Connection.Open-Ok``.

The session checks the order of the methods, and passes the methods to the `Handshake`. A login is delayed if several
logins from the same address have just failed. A callback gets the result of a login, because another thread checks
hashed passwords.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from pamqp import commands

from qflow_client.amqp.frames import FRAME_MIN_SIZE
from qflow_client.broker.core import wire
from qflow_client.broker.core.errors import ConnectionException, ReplyCode
from qflow_client.broker.core.logins import MECHANISMS, Login, login_refusal, read_login
from qflow_client.broker.core.logs import get_logger
from qflow_client.broker.core.output import Output
from qflow_client.broker.core.virtualhost import VirtualHost

__all__ = ["Handshake"]

_log = get_logger(__name__)

# Maximum length of `Handshake.client_name` in characters.
_LONGEST_NAME = 200


class Handshake:
    """Opens one connection, and keeps the negotiated values."""

    __slots__ = (
        "_capabilities",
        "_dialect",
        "_host",
        "_login",
        "_output",
        "_settings",
        "channel_max",
        "client_name",
        "client_properties",
        "expires_at",
        "frame_max",
        "heartbeat",
        "login_at",
        "user",
    )

    def __init__(self, host: VirtualHost, output: Output) -> None:
        self._host = host
        self._output = output
        self._settings = host.settings
        self._dialect = host.settings.dialect
        # The delayed login, and the time at which it has to be checked; None and infinite if no login is delayed.
        self._login: Login | None = None
        self.login_at = math.inf
        # The user name; empty before the login.
        self.user = ""
        # The time at which the login expires; infinite if it does not expire.
        self.expires_at = math.inf
        self.client_properties: Mapping[str, Any] = {}
        #: The client property `connection_name`; empty if the client does not send one.
        self.client_name = ""
        self._capabilities: Mapping[str, Any] = {}
        # The negotiated values.
        self.frame_max = FRAME_MIN_SIZE
        self.channel_max = self._settings.channel_max
        self.heartbeat = 0

    def understands(self, capability: str) -> bool:
        """Whether the client announced a capability that the broker has too."""
        return self._capabilities.get(capability) is True and self._dialect.has(capability)

    def start(self) -> None:
        start = commands.Connection.Start(
            server_properties=self._dialect.server_properties, mechanisms=MECHANISMS, locales="en_US"
        )
        self._output.write(wire.method(0, start))

    def start_ok(
        self, method: commands.Connection.StartOk, address: str, now: float, done: Callable[[str | None], None]
    ) -> None:
        """Handle the client's properties and login.

        Args:
            address: address of the client; empty if it has none.
            now: monotonic seconds.
            done: called with the reason why the login is refused, or with ``None`` if it is accepted. If the login is
                delayed, `done` is not called, and the caller has to call `check_login` at `login_at`.
        """
        self.client_properties = method.client_properties or {}
        name = self.client_properties.get("connection_name")
        self.client_name = name[:_LONGEST_NAME] if isinstance(name, str) else ""
        capabilities = self.client_properties.get("capabilities")
        self._capabilities = capabilities if isinstance(capabilities, dict) else {}
        self._login = read_login(method.mechanism, method.response or b"")
        if self._login is None:
            done(f"mechanism {method.mechanism!r} is not offered; use {' or '.join(MECHANISMS.split())}")
        else:
            self.check_login(address, now, done)

    def check_login(self, address: str, now: float, done: Callable[[str | None], None]) -> None:
        """Check the login. If the login is delayed, the caller has to call this method again at `login_at`."""
        login = self._login
        assert login is not None
        delay = self._host.failed_logins.delay(address, now)
        if delay:
            self.login_at = now + delay
            return
        self._login = None
        self.login_at = math.inf

        def checked(valid_for: float) -> None:
            refusal = login_refusal(login, self._settings.loopback_users, address, is_right=valid_for > 0)
            if refusal is None:
                self.user = login.user
                self.expires_at = self._host.clock() + valid_for
            done(refusal)

        self._host.logins.check(login, address, now, checked)

    def tune(self) -> None:
        settings = self._settings
        tune = commands.Connection.Tune(settings.channel_max, settings.frame_max, settings.heartbeat)
        self._output.write(wire.method(0, tune))

    def tune_ok(self, method: commands.Connection.TuneOk) -> None:
        """Check and store the client's values, which must be within the limits of Connection.Tune.

        Raises:
            ConnectionException: 530 if the broker does not allow a value.
        """
        settings = self._settings
        channel_max = method.channel_max or settings.channel_max
        frame_max = method.frame_max or settings.frame_max
        if channel_max > settings.channel_max:
            raise ConnectionException(
                ReplyCode.NOT_ALLOWED, f"channel_max {channel_max} is above the broker's {settings.channel_max}"
            )
        if not FRAME_MIN_SIZE <= frame_max <= settings.frame_max:
            raise ConnectionException(
                ReplyCode.NOT_ALLOWED,
                f"frame_max {frame_max} must be from {FRAME_MIN_SIZE} to the broker's {settings.frame_max}",
            )
        self.channel_max = channel_max
        self.frame_max = frame_max
        self.heartbeat = method.heartbeat or 0

    def check_open(self, method: commands.Connection.Open, name: str) -> None:
        """Check that the client may open the virtual host.

        Args:
            name: name of the connection, for the log.

        Raises:
            ConnectionException: 530 if the virtual host does not exist, or if the maximum number of connections is
                reached.
        """
        virtual_host, limit = self._settings.virtual_host, self._settings.max_connections
        if method.virtual_host != virtual_host:
            raise ConnectionException(
                ReplyCode.NOT_ALLOWED,
                f"vhost {method.virtual_host!r} does not exist; the broker has {virtual_host!r}",
            )
        if self._host.open_connections >= limit:
            _log.warning(
                "%s: the connection is refused, because %d connections are open (max_connections)", name, limit
            )
            raise ConnectionException(
                ReplyCode.NOT_ALLOWED,
                f"the limit of connections is reached (max_connections={limit}); close some, or raise that setting of "
                "the broker",
            )

    def update_secret(self, method: commands.Connection.UpdateSecret, now: float) -> None:
        """Check a new secret of the user. If the secret is valid, set a new time at which the login expires.

        Raises:
            ConnectionException: 530 if the secret is refused.
        """
        valid_for = self._host.logins.renewed_for(self.user, (method.new_secret or "").encode())
        if not valid_for:
            raise ConnectionException(ReplyCode.NOT_ALLOWED, f"the new secret of user {self.user!r} was refused")
        self._output.write(wire.method(0, commands.Connection.UpdateSecretOk()))
        self.expires_at = now + valid_for
