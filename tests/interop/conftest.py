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

# With a virtual host goes all that is in it.
_EMPTY = """
    rabbit_vhost:delete(<<"/">>, <<"tests">>),
    rabbit_vhost:add(<<"/">>, <<"tests">>),
    rabbit_auth_backend_internal:set_permissions(<<"guest">>, <<"/">>, <<".*">>, <<".*">>, <<".*">>, <<"tests">>).
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # On a busy machine a node, or a program that tells it what to do, may take a minute to start.
    for item in items:
        if item.path.is_relative_to(HERE) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(600))


# What tests have shown, in the order in which they ran.
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
    # What only a part of them has shown is no compatibility.
    if (contract or clients) and not session.config.option.keyword:
        kept = matrix.document(contract, clients, kept.get("flights", ()))
    # The flights take their time, so they may be shown in parts.
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
    """Makes something, or skips the test, or is an error, where the machine lacks what it takes."""
    return _make


@pytest.fixture(scope="session")
def nodes() -> Iterator[ExitStack]:
    """What is stopped after all tests."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="session")
def session_rabbitmq(nodes: ExitStack) -> Callable[[], RabbitMQNode]:
    """Starts a RabbitMQ node for all tests when it is first asked for."""
    return cache(lambda: nodes.enter_context(_make(RabbitMQNode)))


@pytest.fixture(scope="session")
def session_container(nodes: ExitStack, session_rabbitmq: Callable[[], RabbitMQNode]) -> Callable[[str], RabbitMQ]:
    """Starts RabbitMQ of a major release in a container for all tests when it is first asked for.

    Where there is no container engine, nor has to be, the installed package will do if it is of that release.
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
    """Starts a Broker-J of a release for all tests when it is first asked for, or takes that of the environment.

    It closes channels that go on publishing after one second instead of five, where it is started here.
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
    """A running RabbitMQ node for all tests: leave it running, without alarms, and use queues of your own."""
    return session_rabbitmq()


@pytest.fixture(scope="session", params=["package", "4"])
def each_rabbitmq(
    request: pytest.FixtureRequest,
    session_rabbitmq: Callable[[], RabbitMQNode],
    session_container: Callable[[str], RabbitMQ],
) -> RabbitMQ:
    """A running RabbitMQ for all tests, that of the package and 4: leave it without alarms, and use your own queues."""
    return session_rabbitmq() if request.param == "package" else session_container(request.param)


@pytest.fixture(scope="session")
def spare_rabbitmq() -> Iterator[RabbitMQNode]:
    """A RabbitMQ node for `own_rabbitmq`."""
    node = _make(RabbitMQNode)
    yield node
    node.close()


@pytest.fixture
def own_rabbitmq(spare_rabbitmq: RabbitMQNode) -> RabbitMQNode:
    """A running RabbitMQ node for one test, to crash and stop as it likes: without alarms, connections and queues."""
    spare_rabbitmq.resume()
    spare_rabbitmq.start()
    spare_rabbitmq.clear_memory_alarm()
    spare_rabbitmq.clear_disk_alarm()
    assert spare_rabbitmq.evaluate(_EMPTY) == "ok"
    return spare_rabbitmq


@pytest.fixture(scope="session", params=VERSIONS)
def brokerj(request: pytest.FixtureRequest, session_brokerj: Callable[[str], BrokerJ]) -> BrokerJ:
    """A running Broker-J of each release for all tests: use queues of your own."""
    return session_brokerj(request.param)


@pytest.fixture
def own_brokerj() -> Iterator[BrokerJNode]:
    """A running Broker-J for one test, to stop as it likes."""
    with _make(BrokerJNode) as node:
        yield node
