"""Private Apache Qpid Broker-J brokers, whose queues can send ``Channel.Flow`` to producers that overfill them.

Maven downloads the jars of a version once into a cache folder. Each broker has its own ports, folder, configuration and
password. It keeps all data in memory, and listens only on the loopback interface.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from qflow_client.testing.node import HOST, Node, free_port

__all__ = ["VERSIONS", "BrokerJ", "BrokerJError", "BrokerJNode", "BrokerJNotInstalled"]

#: The versions of Broker-J that the project's tests use, oldest first.
VERSIONS = ("9.2.1", "10.1.0")

_USER = "guest"
_VIRTUAL_HOST = "default"
_READY = "BRK-1004"
_FETCH_TIMEOUT = 300.0
_REST_TIMEOUT = 20.0

_PLUGINS = (
    "amqp-0-8-protocol",
    "logging-logback",
    "management-http",
    "memory-store",
)
# The artifact qpid-broker has the main class. Without the exclusions, Maven would also download every plugin.
_POM = """\
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>qflow-client</groupId>
  <artifactId>broker-j</artifactId>
  <version>{version}</version>
  <packaging>pom</packaging>
  <dependencies>
    <dependency>
      <groupId>org.apache.qpid</groupId>
      <artifactId>qpid-broker</artifactId>
      <version>{version}</version>
      <exclusions>
        <exclusion><groupId>org.apache.qpid</groupId><artifactId>*</artifactId></exclusion>
      </exclusions>
    </dependency>
{dependencies}
  </dependencies>
</project>
"""
_DEPENDENCY = """\
    <dependency>
      <groupId>org.apache.qpid</groupId>
      <artifactId>{artifact}</artifactId>
      <version>{version}</version>
    </dependency>"""


class BrokerJError(RuntimeError):
    """A broker did not start, refused a request, or did not answer."""


class BrokerJNotInstalled(BrokerJError):
    """This machine has no Java, or the jars of Broker-J are missing and cannot be downloaded."""


class BrokerJ:
    """A running Broker-J and its REST API. Any program may have started the broker.

    Args:
        url: AMQP URL of a virtual host. The REST API uses the same user and password.
        management_url: HTTP URL of the REST API.
        virtual_host_node: name of the virtual host's node; ``None`` if it is the same as the virtual host's name.
    """

    def __init__(self, url: str, management_url: str, *, virtual_host_node: str | None = None) -> None:
        parts = urlsplit(url)
        self._url = url
        self._port = parts.port or 5672
        self._api = management_url.rstrip("/") + "/api/latest/"
        virtual_host = parts.path.removeprefix("/")
        self._parent = f"{quote(virtual_host_node or unquote(virtual_host), safe='')}/{virtual_host}"
        credentials = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
        self._authorization = "Basic " + base64.b64encode(credentials.encode()).decode("ascii")

    @property
    def url(self) -> str:
        """The AMQP URL of the virtual host."""
        return self._url

    @property
    def port(self) -> int:
        """The AMQP port."""
        return self._port

    def queue(self, name: str) -> dict[str, Any]:
        """Return the attributes of a queue. The attribute ``statistics`` contains numbers such as ``queueDepthBytes``.

        Raises:
            BrokerJError: the queue does not exist, or the broker does not answer.
        """
        answer = self._request("GET", self._queue_path(name))
        # Some versions return a list with one queue.
        queue: dict[str, Any] = answer[0] if isinstance(answer, list) else answer
        return queue

    def make_queue(self, name: str, **attributes: object) -> None:
        """Create a queue.

        Args:
            name: name of the queue, without a slash, which the broker's HTTP server would refuse.
            attributes: attributes with Broker-J's names, such as ``overflowPolicy="PRODUCER_FLOW_CONTROL"``.

        Raises:
            BrokerJError: the broker refuses the request, or does not answer.
        """
        self._request("PUT", self._queue_path(name), {"name": name, **attributes})

    def change_queue(self, name: str, **attributes: object) -> None:
        """Change attributes of a queue. The arguments and errors are the same as for `make_queue`."""
        self._request("POST", self._queue_path(name), attributes)

    def set_context(self, variables: Mapping[str, object]) -> None:
        """Replace all context variables of the virtual host, such as ``queue.defaultOverflowPolicy``.

        The errors are the same as for `make_queue`.
        """
        context = {name: str(value) for name, value in variables.items()}
        self._request("POST", f"virtualhost/{self._parent}", {"context": context})

    def _queue_path(self, name: str) -> str:
        return f"queue/{self._parent}/{quote(name, safe='')}"

    def _request(self, method: str, path: str, body: object = None) -> Any:
        request = urllib.request.Request(
            self._api + path,
            None if body is None else json.dumps(body).encode(),
            {"Authorization": self._authorization, "Content-Type": "application/json"},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=_REST_TIMEOUT) as response:
                text = response.read()
        except urllib.error.HTTPError as error:
            with error:
                words = error.read().decode("utf-8", "replace")
            raise BrokerJError(f"Broker-J answered {method} {path} with {error.code}: {words:.500}") from None
        except OSError as error:
            raise BrokerJError(f"Broker-J did not answer {method} {path}: {error}") from error
        return json.loads(text) if text else None


class BrokerJNode(Node, BrokerJ):
    """A private Broker-J with one virtual host, which has the name ``default`` and keeps its data in memory.

    The context manager starts the broker on entry and closes it on exit::

        with BrokerJNode() as node:
            connection = pika.BlockingConnection(pika.URLParameters(node.url))

    Args:
        version: version of the broker. At the first use of a version, Maven downloads the jars. They go to the folder
            of the environment variable ``QFLOW_BROKERJ_CACHE``, or else to the user's cache folder.
        flow_enforcement_timeout: the broker closes a channel that publishes later than this number of seconds after
            ``Channel.Flow(active=false)``. ``None`` for the broker's default, 5 seconds.
        start_timeout: maximum seconds that `start` waits until the broker is ready.

    Raises:
        BrokerJNotInstalled: Java is missing, or the jars of Broker-J are missing and cannot be downloaded.
    """

    _error = BrokerJError

    def __init__(
        self,
        version: str = VERSIONS[-1],
        *,
        flow_enforcement_timeout: float | None = None,
        start_timeout: float = 180.0,
    ) -> None:
        self._java = _find_java()
        self._jars = _fetch(version)
        taken: set[int] = set()
        port = free_port(taken)
        taken.add(port)
        self._http_port = free_port(taken)
        self._password = secrets.token_hex(16)
        BrokerJ.__init__(
            self, f"amqp://{_USER}:{self._password}@{HOST}:{port}/{_VIRTUAL_HOST}", f"http://{HOST}:{self._http_port}"
        )
        self.version = version
        self._context: dict[str, str] = {}
        if flow_enforcement_timeout is not None:
            self._context["channel.flowControlEnforcementTimeout"] = str(round(flow_enforcement_timeout * 1000))
        temporary = tempfile.TemporaryDirectory(prefix="qflow-brokerj-", ignore_cleanup_errors=True)
        Node.__init__(self, f"Broker-J {version} on port {port}", Path(temporary.name), temporary, start_timeout)
        self._log_file = self._directory / "qpid.log"
        self._configuration_file = self._directory / "configuration.json"

    @property
    def log(self) -> str:
        """The log since the last start. ``QUE-1003`` means that a queue is overfull, ``QUE-1004`` that it has room."""
        return self._log_file.read_text(encoding="utf-8", errors="replace") if self._log_file.exists() else ""

    def _prepare(self) -> None:
        self._log_file.unlink(missing_ok=True)
        self._configuration_file.touch(mode=0o600)
        self._configuration_file.write_text(json.dumps(self._configuration()), encoding="utf-8")

    def _command(self) -> list[str]:
        return [
            self._java,
            "-Xmx256m",
            "-XX:TieredStopAtLevel=1",
            f"-DQPID_HOME={self._directory}",
            f"-DQPID_WORK={self._directory}",
            "-cp",
            f"{self._jars}/*",
            "org.apache.qpid.server.Main",
            "--store-type",
            "Memory",
            "--initial-config-path",
            str(self._configuration_file),
        ]

    def _environment(self) -> dict[str, str]:
        # Remove ``QPID_…`` variables, because settings for another Broker-J would change this broker.
        return {name: value for name, value in os.environ.items() if not name.startswith("QPID_")}

    def _is_ready(self) -> bool:
        return _READY in self._said()

    def _said(self) -> str:
        return self.log + (self._directory / "console.log").read_text(encoding="utf-8", errors="replace")

    def _configuration(self) -> dict[str, Any]:
        port = {"bindingAddress": HOST, "authenticationProvider": "plain"}
        rules = [
            {"name": name, "type": "NameAndLevel", "loggerName": logs, "level": level}
            for name, logs, level in (("root", "ROOT", "WARN"), ("operational", "qpid.message.*", "INFO"))
        ]
        return {
            "name": "qflow",
            "modelVersion": "9.1",
            "context": self._context,
            "authenticationproviders": [
                {
                    "name": "plain",
                    "type": "Plain",
                    # PLAIN without TLS is safe here, because no other machine can read the loopback interface.
                    "secureOnlyMechanisms": [],
                    "users": [{"name": _USER, "type": "managed", "password": self._password}],
                }
            ],
            "brokerloggers": [
                {
                    "name": "file",
                    "type": "File",
                    "fileName": str(self._log_file),
                    "brokerloginclusionrules": rules,
                }
            ],
            "ports": [
                {
                    **port,
                    "name": "AMQP",
                    "port": str(self.port),
                    "protocols": ["AMQP_0_9_1"],
                    "virtualhostaliases": [{"name": "nameAlias", "type": "nameAlias"}],
                },
                {**port, "name": "HTTP", "port": str(self._http_port), "protocols": ["HTTP"]},
            ],
            "virtualhostnodes": [
                {"name": _VIRTUAL_HOST, "type": "Memory", "virtualHostInitialConfiguration": '{"type": "Memory"}'}
            ],
            "plugins": [{"name": "management", "type": "MANAGEMENT-HTTP", "httpBasicAuthenticationEnabled": True}],
        }


def _find_java() -> str:
    home = os.environ.get("JAVA_HOME")
    found = shutil.which("java", path=os.pathsep.join(filter(None, (home and f"{home}/bin", os.environ.get("PATH")))))
    if found is None:
        raise BrokerJNotInstalled(
            "java was not found: install Java 17 or later (Debian and Ubuntu: apt-get install default-jre-headless; "
            "macOS: brew install openjdk), put it on the PATH or set JAVA_HOME"
        )
    return found


def _cache() -> Path:
    own = os.environ.get("QFLOW_BROKERJ_CACHE")
    if own:
        return Path(own).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qflow-client" / "broker-j"


def _fetch(version: str) -> Path:
    """Return the folder with the jars. Download them first if they are missing."""
    folder = _cache() / version
    if folder.is_dir():
        return folder
    maven = shutil.which("mvn")
    if maven is None:
        raise BrokerJNotInstalled(
            f"mvn, which fetches Apache Qpid Broker-J {version}, was not found: install Maven "
            f"(Debian and Ubuntu: apt-get install maven; macOS: brew install maven) or put it on the PATH"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fetching-", dir=folder.parent) as temporary:
        pom, jars = Path(temporary, "pom.xml"), Path(temporary, "jars")
        artifacts = [f"qpid-broker-plugins-{name}" for name in _PLUGINS]
        dependencies = "\n".join(
            _DEPENDENCY.format(artifact=artifact, version=version) for artifact in ("qpid-broker-core", *artifacts)
        )
        pom.write_text(_POM.format(version=version, dependencies=dependencies), encoding="utf-8")
        command = [maven, "-B", "-q", "-f", str(pom), "dependency:copy-dependencies"]
        try:
            done = subprocess.run(
                [*command, "-DincludeScope=runtime", f"-DoutputDirectory={jars}"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_FETCH_TIMEOUT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise BrokerJNotInstalled(
                f"Maven did not fetch Apache Qpid Broker-J {version} within {_FETCH_TIMEOUT:g} s"
            ) from None
        if done.returncode != 0:
            words = "\n  ".join((done.stdout + done.stderr).strip().splitlines()[:10])
            raise BrokerJNotInstalled(f"Maven could not fetch Apache Qpid Broker-J {version}:\n  {words}")
        # The rename is atomic. It fails if another process has already created the folder with the same jars.
        with contextlib.suppress(OSError):
            jars.rename(folder)
    return folder
