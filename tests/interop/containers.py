"""RabbitMQ in containers. A container ends with the process that started it, even if this process is killed."""

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
# Maximum seconds for the start of RabbitMQ and for an answer of the engine. A busy machine needs half of this time.
_START_TIMEOUT = 120
_ANSWER_TIMEOUT = 60

_HOW = "`.ci/containers start` and `.ci/containers images` get both on Debian"

# The Erlang cookie is in RabbitMQ's home folder.
_EVALUATE = """echo "$1" | HOME=/var/lib/rabbitmq erl_call -n "${RABBITMQ_NODENAME:-rabbit@$(hostname)}" -e"""

# A program that removes the containers when the pipe from the test process closes. testcontainers uses a container for
# this, but that must be pulled, and may be lost. If the test process has not ended normally, the engine may still
# create a container, so the program repeats the search.
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
    """This machine has no container engine, or no image of RabbitMQ."""


class RabbitMQContainer(RabbitMQ):
    """RabbitMQ in a container. The context manager starts the container on entry and removes it on exit.

    Args:
        release: the major release of RabbitMQ.

    Raises:
        ContainersNotAvailable: there is no container engine, or no image.
    """

    def __init__(self, release: str) -> None:
        image = _image(release)
        self._container = DockerContainer(image).with_exposed_ports(_AMQP)
        self._container.waiting_for(_Handshake().with_startup_timeout(_START_TIMEOUT).with_poll_interval(0.1))

    @property
    def url(self) -> str:
        """The AMQP URL of the node's default virtual host, for its default user."""
        host, port = self._container.get_container_host_ip(), self._container.get_exposed_port(_AMQP)
        return f"amqp://guest:guest@{host}:{port}/%2F"

    def ctl(self, *args: str) -> str:
        """Run ``rabbitmqctl`` in the container, and return its output.

        Raises:
            RabbitMQError: the command has failed. The text contains the output.
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

    def __enter__(self) -> Self:
        _reap_at_the_end()
        self._container.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._container.stop()


class _Handshake(WaitStrategy):
    """Waits until RabbitMQ answers a client's first bytes. The engine accepts connections long before that."""

    def wait_until_ready(self, container: WaitStrategyTarget) -> None:
        address = container.get_container_host_ip(), int(container.get_exposed_port(_AMQP))
        if not self._poll(lambda: speaks_amqp(*address)):
            raise TimeoutError(f"RabbitMQ did not answer on port {address[1]} within {self._startup_timeout:g} s")


def _image(release: str) -> str:
    """Return the name of an image of a major release. Pull the image if the engine does not have it."""
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
    """Start a process that removes the containers of the current process when the current process has ended."""
    testcontainers_config.ryuk_disabled = True
    process = subprocess.Popen(
        [sys.executable, "-c", _REAPER, f"{LABEL_SESSION_ID}={SESSION_ID}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    atexit.register(process.communicate, b"well", timeout=_ANSWER_TIMEOUT)
