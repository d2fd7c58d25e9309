"""Runs the suites that aio-pika and kombu carry on RabbitMQ, with the original and with the drop-in in its place.

    python -m tests.interop.suites.dropins              # both
    python -m tests.interop.suites.dropins kombu --json # with the outcome of each test

What passes with the original has to pass with the drop-in, but for `DIFFERENT`. An entry of `DIFFERENT` that passes is
an error as well. What fails with the original proves nothing. pika's distributions carry no tests; there the members
are compared one by one (`tests/integration/dropin/test_parity.py`).
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
# What the library here needs.
_OURS: Final = ("aio-pika", "pika<2", "opentelemetry-api")

#: Tests that pass with the original only, by suite; docs/migrate-aio-pika.md and docs/migrate-celery.md say why.
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
# Fail now and then with the original, too, depending on the machine's speed or on which tests ran before.
_UNSTEADY: Final = (
    "tests/test_amqp_robust_proxy.py::test_channel_reconnect_stairway",
    # Its iterator has a timeout of 50 ms, which is also the timeout of `Basic.Consume` while the test begins.
    "tests/test_amqp_robust_proxy.py::test_iterator_cancellation_survives_close_timeout",
    "tests/test_memory_leak.py::test_leak_unclosed_channel",
    # It opens channels while the connection is restored, and the connection may be closed at that moment. On a busy
    # machine it fails in most runs, with aio-pika and with the drop-in.
    "tests/test_reconnect_channel_snapshot.py::test_create_channels_during_reconnect",
)


class Suite(NamedTuple):
    """A suite.

    Attributes:
        fetch: gets it, and returns its folder.
        plugin: the plugin of pytest that puts the drop-in in place.
        arguments: for pytest.
    """

    fetch: Callable[[], Path]
    plugin: str
    arguments: Sequence[str]


SUITES: Final = {
    "aio-pika": Suite(
        lambda: fetch_aio_pika(*_OURS),
        "aio_pika_replaced",
        # There is no TLS here.
        ["tests", "--ignore=tests/test_amqps.py", *(f"--deselect={test}" for test in _UNSTEADY)],
    ),
    "kombu": Suite(
        lambda: fetch_sdist("kombu", "kombu", *_OURS),
        "kombu_replaced",
        # Nothing is tried a second time.
        ["t/integration/test_py_amqp.py", "t/unit/transport/test_pyamqp.py", "-p", "no:rerunfailures"],
    ),
}


def run(suite: Suite, *, replaced: bool) -> Outcomes:
    """Run a suite on a RabbitMQ of its own, with the original or with the drop-in."""
    folder = suite.fetch()
    with RabbitMQNode() as node:
        port = urlsplit(node.url).port or 5672
        if replaced:
            path = f"{HERE / 'plugins'}:{_ROOT}"
            return run_pytest(folder, port, *suite.arguments, "-p", suite.plugin, path=path)
        return run_pytest(folder, port, *suite.arguments)


def differences(name: str, original: Outcomes, ours: Outcomes) -> list[str]:
    """What has to be explained: tests that pass with the original only, and exceptions that are none."""
    known = DIFFERENT[name]
    failed = {test for test, passed in original.items() if passed and not ours.get(test, False)}
    return [f"passes with the original only: {test}" for test in sorted(failed - known)] + [
        f"is in DIFFERENT and passes: {test}" for test in sorted(known - failed)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run suites, print what each shows, and return the exit code."""
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
