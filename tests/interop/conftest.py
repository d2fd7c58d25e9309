from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import pytest

from qflow_client.testing.brokerj import VERSIONS, BrokerJ, BrokerJNode, BrokerJNotInstalled
from qflow_client.testing.rabbitmq import RabbitMQ, RabbitMQNode, RabbitMQNotInstalled
from tests.interop import matrix
from tests.interop.containers import ContainersNotAvailable, RabbitMQContainer
from tests.interop.contract.providers import version_of
from tests.interop.toolchains import ToolchainNotInstalled

Made = TypeVar("Made")

HERE = Path(__file__).parent

# Deleting a virtual host also deletes everything in it.
_EMPTY = """
    rabbit_vhost:delete(<<"/">>, <<"tests">>),
    rabbit_vhost:add(<<"/">>, <<"tests">>),
    rabbit_auth_backend_internal:set_permissions(<<"guest">>, <<"/">>, <<".*">>, <<".*">>, <<".*">>, <<"tests">>).
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # On a busy machine, a node or a program that controls a node may take a minute to start.
    for item in items:
        if item.path.is_relative_to(HERE) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(600))


# Results that tests have recorded, in the order of the tests.
_shown: dict[str, list[dict[str, Any]]] = {matrix.CONTRACT: [], matrix.CLIENT: [], matrix.FLIGHTS: []}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        for name, shown in report.user_properties:
            if name in _shown and isinstance(shown, dict):
                told = {**shown, "outcome": report.outcome} if name == matrix.CONTRACT else shown
                if name == matrix.FLIGHTS and report.outcome != "passed":
                    continue
                _shown[name].append(told)


def pytest_sessionfinish(session: pytest.Session) -> None:
    told = os.environ.get("QFLOW_COMPATIBILITY")
    if not told:
        return
    path = Path(told)
    kept = matrix.load(path) if path.exists() else matrix.document((), ())
    contract, clients, flights = (_shown[name] for name in (matrix.CONTRACT, matrix.CLIENT, matrix.FLIGHTS))
    # A selection of the tests does not show the compatibility.
    if (contract or clients) and not session.config.option.keyword:
        kept = matrix.document(contract, clients, kept.get("flights", ()))
    # Sending the flights takes long, so several runs may record parts of the results.
    matrix.dump(matrix.with_flights(kept, flights), path)


def _required() -> bool:
    return os.environ.get("QFLOW_REQUIRE_BROKERS") == "1"


def _missing(missing: Exception) -> NoReturn:
    if _required():
        pytest.fail(f"{missing} (QFLOW_REQUIRE_BROKERS=1 forbids to skip)", pytrace=False)
    pytest.skip(str(missing))


def _make(make: Callable[[], Made]) -> Made:
    try:
        return make()
    except (BrokerJNotInstalled, RabbitMQNotInstalled, ToolchainNotInstalled) as missing:
        _missing(missing)


@pytest.fixture
def installed() -> Callable[[Callable[[], Made]], Made]:
    """A function that creates something. If a program is missing, it skips the test, or fails if tests are required."""
    return _make


@pytest.fixture(scope="session")
def nodes() -> Iterator[ExitStack]:
    """A stack of nodes, which are stopped after all tests."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="session")
def session_rabbitmq(nodes: ExitStack) -> Callable[[], RabbitMQNode]:
    """A function that returns a RabbitMQ node, which all tests share. The first call starts the node."""
    return cache(lambda: nodes.enter_context(_make(RabbitMQNode)))


@pytest.fixture(scope="session")
def session_container(nodes: ExitStack, session_rabbitmq: Callable[[], RabbitMQNode]) -> Callable[[str], RabbitMQ]:
    """A function that returns a major release of RabbitMQ in a container, which all tests share.

    If there is no container engine, and none is required, the installed package is used if it has this release.
    """

    @cache
    def container(release: str) -> RabbitMQ:
        try:
            made = RabbitMQContainer(release)
        except ContainersNotAvailable as missing:
            if not _required() and version_of((package := session_rabbitmq()).url).startswith(f"{release}."):
                return package
            _missing(missing)
        return nodes.enter_context(made)

    return container


@pytest.fixture(scope="session")
def session_brokerj(nodes: ExitStack) -> Callable[[str], BrokerJ]:
    """A function that returns a Broker-J of a release, which all tests share, or the Broker-J of the environment.

    If the function starts the broker, a channel that publishes after a stop is closed after one second, not after five.
    """

    @cache
    def brokerj(version: str) -> BrokerJ:
        url, management_url = (os.environ.get(f"QFLOW_BROKERJ_{name}") for name in ("URL", "MANAGEMENT_URL"))
        if url and management_url:
            if version != VERSIONS[-1]:
                pytest.skip("QFLOW_BROKERJ_URL names one broker, which is tested once")
            return BrokerJ(url, management_url)
        return nodes.enter_context(_make(lambda: BrokerJNode(version, flow_enforcement_timeout=1.0)))

    return brokerj


@pytest.fixture(scope="session")
def rabbitmq(session_rabbitmq: Callable[[], RabbitMQNode]) -> RabbitMQNode:
    """A running RabbitMQ node that all tests share. Leave it running and without alarms, and use your own queues."""
    return session_rabbitmq()


@pytest.fixture(scope="session", params=["package", "4"])
def each_rabbitmq(
    request: pytest.FixtureRequest,
    session_rabbitmq: Callable[[], RabbitMQNode],
    session_container: Callable[[str], RabbitMQ],
) -> RabbitMQ:
    """RabbitMQ of the package, and RabbitMQ 4. All tests share them. Leave no alarms, and use your own queues."""
    return session_rabbitmq() if request.param == "package" else session_container(request.param)


@pytest.fixture(scope="session")
def spare_rabbitmq() -> Iterator[RabbitMQNode]:
    """A RabbitMQ node for `own_rabbitmq`."""
    node = _make(RabbitMQNode)
    yield node
    node.close()


@pytest.fixture
def own_rabbitmq(spare_rabbitmq: RabbitMQNode) -> RabbitMQNode:
    """A running RabbitMQ node without alarms, connections and queues. The test may stop and kill the node."""
    spare_rabbitmq.resume()
    spare_rabbitmq.start()
    spare_rabbitmq.clear_memory_alarm()
    spare_rabbitmq.clear_disk_alarm()
    assert spare_rabbitmq.evaluate(_EMPTY) == "ok"
    return spare_rabbitmq


@pytest.fixture(scope="session", params=VERSIONS)
def brokerj(request: pytest.FixtureRequest, session_brokerj: Callable[[str], BrokerJ]) -> BrokerJ:
    """A running Broker-J of each release. All tests share these brokers. Use your own queues."""
    return session_brokerj(request.param)


@pytest.fixture
def own_brokerj() -> Iterator[BrokerJNode]:
    """A running Broker-J for one test. The test may stop it."""
    with _make(BrokerJNode) as node:
        yield node
