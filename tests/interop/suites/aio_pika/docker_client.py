"""Replaces the suite's module of this name. It uses the broker that the environment names, and not a container."""

from __future__ import annotations

import os
from dataclasses import dataclass, field


class DockerNotAvailableError(Exception):
    """This error is never raised."""


@dataclass
class DockerHostInfo:
    container_host: str = "127.0.0.1"


@dataclass
class ContainerInfo:
    id: str = "broker"
    host: str = "127.0.0.1"
    # No broker listens on port 1, which replaces the TLS port.
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
