"""Runs the suites that aio-pika and kombu carry on RabbitMQ, with the original and with the drop-in in its place.

    python -m tests.interop.suites.dropins              # both
    python -m tests.interop.suites.dropins kombu --json # with the outcome of each test

A test that passes with the original must pass with the drop-in, except for the tests in `DIFFERENT`. A test in
`DIFFERENT` that passes is an error, too. A test that fails with the original proves nothing. pika's distributions have
no tests, so `tests/integration/dropin/test_parity.py` compares the members of pika and of the drop-in.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from qflow_client.testing.rabbitmq import RabbitMQNode
from tests.interop.suites.run import HERE, Outcomes, fetch_aio_pika, fetch_sdist, parse_arguments, run_pytest

_ROOT: Final = HERE.parents[2]
# Packages that the library of this repository needs.
_OURS: Final = ("aio-pika", "pika<2", "opentelemetry-api")

#: Tests that pass only with the original. docs/migrate-aio-pika.md and docs/migrate-celery.md explain the reasons.
DIFFERENT: Final[Mapping[str, frozenset[str]]] = {
    "aio-pika": frozenset(
        f"{test}[{parameters}]"
        for test, values in {
            "tests.test_connection_options > test_connection_factory_passes_properties_and_timeout": (
                *("False-connect", "False-connect_robust", "True-connect", "True-connect_robust"),
            ),
            "tests.test_robust_shutdown > test_restore_waiting_for_lock_stops_on_connection_close": ("False", "True"),
            "tests.test_robust_shutdown > test_close_during_restore_preserves_unrelated_errors": ("False", "True"),
        }.items()
        for parameters in values
    ),
    "kombu": frozenset({"t.unit.transport.test_pyamqp.test_Transport > test_close_connection"}),
}
# Tests that sometimes fail also with the original, depending on the machine's speed or on earlier tests.
_UNSTEADY: Final = (
    "tests/test_amqp_robust_proxy.py::test_channel_reconnect_stairway",
    # The iterator of this test has a timeout of 50 ms, which also limits `Basic.Consume` at the start of the test.
    "tests/test_amqp_robust_proxy.py::test_iterator_cancellation_survives_close_timeout",
    "tests/test_memory_leak.py::test_leak_unclosed_channel",
    # This test opens channels while the connection is restored, and the connection may be closed at that moment. On a
    # busy machine the test fails in most runs, with aio-pika and with the drop-in.
    "tests/test_reconnect_channel_snapshot.py::test_create_channels_during_reconnect",
)


class Suite(NamedTuple):
    """The test suite of a library.

    Attributes:
        fetch: function that downloads the suite, and returns the folder of the suite.
        plugin: pytest plugin that replaces the library by the drop-in.
        arguments: arguments for pytest.
    """

    fetch: Callable[[], Path]
    plugin: str
    arguments: Sequence[str]


SUITES: Final = {
    "aio-pika": Suite(
        lambda: fetch_aio_pika(*_OURS),
        "aio_pika_replaced",
        # The broker has no TLS.
        ["tests", "--ignore=tests/test_amqps.py", *(f"--deselect={test}" for test in _UNSTEADY)],
    ),
    "kombu": Suite(
        lambda: fetch_sdist("kombu", "kombu", *_OURS),
        "kombu_replaced",
        # Do not repeat failed tests.
        ["t/integration/test_py_amqp.py", "t/unit/transport/test_pyamqp.py", "-p", "no:rerunfailures"],
    ),
}


def run(suite: Suite, *, replaced: bool) -> Outcomes:
    """Run a suite on a new RabbitMQ node, with the original or with the drop-in."""
    folder = suite.fetch()
    with RabbitMQNode() as node:
        port = urlsplit(node.url).port or 5672
        if replaced:
            path = f"{HERE / 'plugins'}:{_ROOT}"
            return run_pytest(folder, port, *suite.arguments, "-p", suite.plugin, path=path)
        return run_pytest(folder, port, *suite.arguments)


def differences(name: str, original: Outcomes, ours: Outcomes) -> list[str]:
    """Return the unexpected results: tests that pass only with the original, and tests in `DIFFERENT` that pass."""
    known = DIFFERENT[name]
    failed = {test for test, passed in original.items() if passed and not ours.get(test, False)}
    return [f"passes with the original only: {test}" for test in sorted(failed - known)] + [
        f"is in DIFFERENT and passes: {test}" for test in sorted(known - failed)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run suites, print the result of each suite, and return the exit code."""
    names, as_json = parse_arguments(__doc__, SUITES, arguments)
    wrong: list[str] = []
    for name in names:
        original, ours = run(SUITES[name], replaced=False), run(SUITES[name], replaced=True)
        if as_json:
            print(json.dumps({"original": original, "drop-in": ours}, indent=1))
        passed = [test for test, has_passed in original.items() if has_passed]
        both = sum(ours.get(test, False) for test in passed)
        print(
            f"{name}: {len(original)} tests; {len(passed)} pass with the original, {both} of them with the drop-in, "
            f"{len(DIFFERENT[name])} known differences",
            flush=True,
        )
        wrong += [f"{name}: {each}" for each in differences(name, original, ours)]
    print("\n".join(wrong) if wrong else "what passes with the original passes with the drop-in")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
