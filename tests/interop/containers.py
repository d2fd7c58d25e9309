"""RabbitMQ in containers, which end with the process that started them, however it ends."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
from contextlib import closing, suppress
from functools import cache
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import docker
from docker.errors import DockerException, ImageNotFound
from docker.utils import parse_host
from testcontainers.core.config import testcontainers_config
from testcontainers.core.container import DockerContainer
from testcontainers.core.labels import LABEL_SESSION_ID, SESSION_ID
from testcontainers.core.waiting_utils import WaitStrategy, WaitStrategyTarget

from qflow_client.testing.rabbitmq import RabbitMQ, RabbitMQError, result_of_erl_call, speaks_amqp

#: Major releases of RabbitMQ that are tested in containers.
RELEASES = ("3", "4")

_AMQP = 5672
# Seconds. A machine that is busy takes half of the first to start Erlang, and of the second to answer at all.
_START_TIMEOUT = 120
_ANSWER_TIMEOUT = 60

_HOW = "`.ci/containers start` and `.ci/containers images` get both on Debian"

# RabbitMQ's home has the cookie.
_EVALUATE = """echo "$1" | HOME=/var/lib/rabbitmq erl_call -n "${RABBITMQ_NODENAME:-rabbit@$(hostname)}" -e"""

# testcontainers has a container for this, which has to be pulled and can be lost like any other. What it does is this:
# the pipe closes when the process at its other end is gone. Unless that has said that all is well, a container may be
# in the making, which appears later.
_REAPER = """
import sys, time
import docker
from docker.errors import DockerException

well = sys.stdin.read()
for at in range(60):
    try:
        engine = docker.from_env()
        for container in engine.containers.list(all=True, ignore_removed=True, filters={"label": sys.argv[1]}):
            try:
                container.remove(force=True, v=True)
            except DockerException:
                pass
        if well or at >= 20:
            break
    except (DockerException, OSError):
        # It stalls, or starts anew.
        pass
    time.sleep(1)
"""


class ContainersNotAvailable(RuntimeError):
    """This machine has no container engine, or no image of what is to run in it."""


class RabbitMQContainer(RabbitMQ):
    """RabbitMQ in a container, as a context manager that starts it on entry and removes it on exit.

    Args:
        release: the major release.

    Raises:
        ContainersNotAvailable: there is no engine, or no image.
    """

    def __init__(self, release: str) -> None:
        image = _image(release)
        self._container = DockerContainer(image).with_exposed_ports(_AMQP)
        self._container.waiting_for(_Handshake().with_startup_timeout(_START_TIMEOUT).with_poll_interval(0.1))

    @property
    def url(self) -> str:
        """AMQP URL of the node's default virtual host, for its default user."""
        host, port = self._container.get_container_host_ip(), self._container.get_exposed_port(_AMQP)
        return f"amqp://guest:guest@{host}:{port}/%2F"

    def ctl(self, *args: str) -> str:
        """Run ``rabbitmqctl`` in the container, and return what it printed.

        Raises:
            RabbitMQError: it failed; what it complained of is in the message.
        """
        done = self._container.exec(["rabbitmqctl", "--quiet", *args])
        said = done.output.decode(errors="replace").strip()
        if done.exit_code != 0:
            raise RabbitMQError(f"rabbitmqctl {' '.join(args)} failed with exit code {done.exit_code}:\n  {said}")
        return said

    def evaluate(self, expression: str) -> str:
        """Evaluate an Erlang expression in the node, with ``erl_call`` if the image has it."""
        done = self._container.exec(["sh", "-c", _EVALUATE, "sh", expression])
        result = result_of_erl_call(done.output.decode(errors="replace"))
        return super().evaluate(expression) if result is None else result

    def pause(self) -> None:
        """Suspend it: its connections stay open, and nothing is read or answered."""
        self._container.get_wrapped_container().pause()

    def resume(self) -> None:
        """Take `pause` back."""
        self._container.get_wrapped_container().unpause()

    def __enter__(self) -> Self:
        _reap_at_the_end()
        self._container.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._container.stop()


class _Handshake(WaitStrategy):
    """Ready is what answers a client's first bytes; the engine itself accepts connections long before."""

    def wait_until_ready(self, container: WaitStrategyTarget) -> None:
        address = container.get_container_host_ip(), int(container.get_exposed_port(_AMQP))
        if not self._poll(lambda: speaks_amqp(*address)):
            raise TimeoutError(f"RabbitMQ did not answer on port {address[1]} within {self._startup_timeout:g} s")


def _image(release: str) -> str:
    """The name of an image of a major release that the engine has, or has just pulled."""
    named = os.environ.get(f"QFLOW_RABBITMQ_{release}_IMAGE")
    official = f"rabbitmq:{release}"
    try:
        _knock()
        engine = docker.from_env(timeout=_ANSWER_TIMEOUT)
    except (DockerException, OSError) as error:
        raise ContainersNotAvailable(f"no container engine answers ({error}): {_HOW}") from error
    with closing(engine):
        wanted = [named] if named else [official, f"qflow-client/{official}"]
        for name in wanted:
            with suppress(ImageNotFound):
                engine.images.get(name)
                return name
        try:
            engine.images.pull(wanted[0])
        except (DockerException, OSError) as error:
            raise ContainersNotAvailable(f"there is no image {' or '.join(wanted)} ({error}): {_HOW}") from error
        return wanted[0]


def _knock() -> None:
    """Raise `OSError` if no engine listens. docker's own attempt would leave a socket open."""
    address = urlsplit(parse_host(os.environ.get("DOCKER_HOST")))
    if address.scheme == "http+unix":
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_ANSWER_TIMEOUT)
            connection.connect(address.path)
    elif address.hostname is not None and address.port is not None:
        socket.create_connection((address.hostname, address.port), _ANSWER_TIMEOUT).close()


@cache
def _reap_at_the_end() -> None:
    """Start a process that removes the containers of this one once it is gone."""
    testcontainers_config.ryuk_disabled = True
    process = subprocess.Popen(
        [sys.executable, "-c", _REAPER, f"{LABEL_SESSION_ID}={SESSION_ID}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    atexit.register(process.communicate, b"well", timeout=_ANSWER_TIMEOUT)
