"""The containers in which other tests run RabbitMQ."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import docker
import pytest
from testcontainers.core.labels import LABEL_SESSION_ID

from qflow_client.testing.rabbitmq import RabbitMQ
from tests.integration.producer.tools import eventually
from tests.interop.containers import ContainersNotAvailable, RabbitMQContainer
from tests.interop.contract.providers import PATIENCE

PROGRAM = """
import sys
from testcontainers.core.labels import SESSION_ID
from tests.interop.containers import RabbitMQContainer

print(SESSION_ID, flush=True)
with RabbitMQContainer("4"):
    sys.stdin.read()
"""


def test_without_a_container_engine_the_error_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nobody/listens/here")
    with pytest.raises(ContainersNotAvailable, match=r"no container engine answers .*`\.ci/containers start`"):
        RabbitMQContainer("4")


@pytest.mark.rabbitmq
@pytest.mark.timeout(400)
def test_without_an_image_of_RabbitMQ_the_error_names_the_image_and_how_to_get_it(
    session_container: Callable[[str], RabbitMQ], monkeypatch: pytest.MonkeyPatch
) -> None:
    session_container("4")
    monkeypatch.setenv("QFLOW_RABBITMQ_4_IMAGE", "localhost:1/nothing:4")
    with pytest.raises(ContainersNotAvailable, match=r"no image localhost:1/nothing:4 .*`\.ci/containers images`"):
        RabbitMQContainer("4")


@pytest.mark.rabbitmq
@pytest.mark.timeout(400)
def test_the_container_of_a_killed_process_is_removed(session_container: Callable[[str], RabbitMQ]) -> None:
    session_container("4")
    engine = docker.from_env()
    program = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert program.stdin is not None
    assert program.stdout is not None
    try:
        session = program.stdout.readline().decode().strip()

        def containers() -> int:
            of_it = {"label": f"{LABEL_SESSION_ID}={session}"}
            return len(engine.containers.list(all=True, ignore_removed=True, filters=of_it))

        eventually(lambda: containers() == 1, "the container", timeout=PATIENCE)
        program.kill()
        program.wait(PATIENCE)
        eventually(lambda: containers() == 0, "its end", timeout=PATIENCE)
    finally:
        program.kill()
        program.wait(PATIENCE)
        program.stdin.close()
        program.stdout.close()
        engine.close()
