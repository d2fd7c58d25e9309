"""Stands in for the suite's own module of this name: in place of a container, the broker that the environment names."""

from __future__ import annotations

import os
from dataclasses import dataclass, field


class DockerNotAvailableError(Exception):
    """Is never raised."""


@dataclass
class DockerHostInfo:
    container_host: str = "127.0.0.1"


@dataclass
class ContainerInfo:
    id: str = "broker"
    host: str = "127.0.0.1"
    # Nothing answers on the second.
    ports: dict[str, int] = field(default_factory=lambda: {"5672/tcp": int(os.environ["BROKER_PORT"]), "5671/tcp": 1})


def check_docker_available() -> DockerHostInfo:
    return DockerHostInfo()


class DockerClient:
    def __init__(self, docker_host_info: DockerHostInfo | None = None) -> None:
        pass

    def run(self, image: str, ports: list[str], environment: dict[str, str] | None = None) -> ContainerInfo:
        return ContainerInfo()

    def kill(self, container_id: str) -> None:
        pass

    remove = stop = kill
