"""Runs the test suites of clients of other projects with RabbitMQ and with `qflow broker`, and compares the results.

    python -m tests.interop.suites.run                 # all suites
    python -m tests.interop.suites.run amqplib         # one suite
    python -m tests.interop.suites.run --json amqplib  # with the outcome of each test

A test that passes on RabbitMQ must pass on the broker of this repository, except for the tests in `DIFFERENT`. Each
test in `DIFFERENT` has a row in `docs/dialects.md`. A test in `DIFFERENT` that passes is an error, too. A test that
fails on RabbitMQ proves nothing.

Each suite is downloaded once, in a pinned release, from the registry of its client into the user's cache. Only the
address of the broker is changed in the suite.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit
from xml.etree import ElementTree

from qflow_client.testing.rabbitmq import RabbitMQNode
from tests.interop.toolchains import built, tool

HERE: Final = Path(__file__).parent
#: Whether each test has passed. The keys are the names of the tests.
Outcomes = dict[str, bool]

#: For each suite, the tests that pass only on RabbitMQ, each with the row of docs/dialects.md that explains the reason.
DIFFERENT: Final[dict[str, dict[str, str]]] = {
    "amqp091-go": {
        "TestIntegrationConsumeFlow": "sends `Channel.Flow`",
        "TestIntegrationRecoverNotImplemented": "sends `Basic.Recover` without requeue",
    },
    "py-amqp": {
        f"t.integration.test_rmq.test_rabbitmq_operations > test_publish_consume[plain-{publish}-{mandatory}-True]": (
            "publishes with `immediate`"
        )
        for publish in ("basic_publish", "basic_publish_confirm")
        for mandatory in (False, True)
    },
}

# Maximum seconds of a whole suite, and of one test.
_SUITE: Final = 3600.0
_TEST: Final = 60.0


@dataclass(frozen=True)
class Suite:
    """The test suite of a client.

    Attributes:
        client: name and release of the client.
        fetch: function that downloads the suite, and returns the folder of the suite.
        run: function that runs the suite with a broker on a port of this machine.
        least: minimum number of tests that pass on RabbitMQ. If there are fewer, the suite does not run properly.
    """

    client: str
    fetch: Callable[[], Path]
    run: Callable[[Path, int], Outcomes]
    least: int


def _call(arguments: Sequence[str], folder: Path, limit: float, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments,
        cwd=folder,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=limit,
        check=False,
    )


def _junit(path: Path, prefix: str = "") -> Outcomes:
    """Return the outcomes in a report in JUnit's format, without the skipped tests."""
    found: Outcomes = {}

    def look(element: ElementTree.Element, names: tuple[str, ...]) -> None:
        for each in element:
            if each.tag == "testsuite":
                look(each, (*names, each.get("name", "")))
            elif each.tag == "testcase" and each.find("skipped") is None:
                class_name = each.get("classname", "test")
                test = " > ".join((*names, *((class_name,) if class_name != "test" else ()), each.get("name", "")))
                passed = each.find("failure") is None and each.find("error") is None
                found[test] = passed and found.get(test, True)

    look(ElementTree.parse(path).getroot(), (prefix,) if prefix else ())
    return found


# amqplib.


def _fetch_amqplib() -> Path:
    # Version 2.2.0 is the last release whose package has the tests.
    npm = tool("npm", "npm")
    folder = built(
        HERE / "amqplib",
        [
            [npm, "pack", "--silent", "amqplib@2.2.0"],
            ["tar", "xzf", "amqplib-2.2.0.tgz"],
            # The unit tests generate their data with this package.
            [npm, "install", "--prefix", ".", "--no-save", "--ignore-scripts", "claire@0.4.1"],
        ],
    )
    return folder / "package"


def _run_amqplib(folder: Path, port: int) -> Outcomes:
    node, outcomes = tool("node", "nodejs"), Outcomes()
    for path in sorted((folder / "test").glob("*.test.js")):
        report = folder / f"report-{port}.xml"
        report.unlink(missing_ok=True)
        _call(
            [
                node,
                *("--test", f"--test-timeout={_TEST * 1000:.0f}"),
                *("--test-reporter=junit", f"--test-reporter-destination={report}", str(path)),
            ],
            folder,
            _SUITE,
            URL=f"amqp://guest:guest@127.0.0.1:{port}",
            BROKER_PORT=str(port),
            NODE_OPTIONS=f"--require {folder.parent / 'redirect.js'}",
        )
        outcomes |= _junit(report, path.name.removesuffix(".test.js"))
    return outcomes


# amqp091-go.


def _fetch_amqp091_go() -> Path:
    environment = {"GOTOOLCHAIN": "local", "GOFLAGS": "-mod=mod -buildvcs=false", "CGO_ENABLED": "0"}
    go, package = tool("go", "golang-go"), "github.com/rabbitmq/amqp091-go"
    return built(
        HERE / "amqp091_go",
        [
            [go, "get", "-t", f"{package}@v1.10.0"],
            [go, "test", "-c", "-tags", "integration", "-o", "suite", package],
        ],
        environment,
    )


def _run_amqp091_go(folder: Path, port: int) -> Outcomes:
    """Run each test in a separate process, so that a panic ends no other test."""
    url = f"amqp://guest:guest@127.0.0.1:{port}/"
    listed = re.findall(r"^Test\w+$", _call(["./suite", "-test.list", "^Test"], folder, _TEST).stdout, re.MULTILINE)
    outcomes = Outcomes()
    for test in listed:
        done = _call(
            ["./suite", "-test.v", "-test.run", f"^{test}$", "-test.timeout", f"{_TEST:.0f}s"],
            folder,
            _TEST * 2,
            AMQP_URL=url,
        )
        if f"--- SKIP: {test}" not in done.stdout:
            outcomes[test] = f"--- PASS: {test}" in done.stdout
    return outcomes


# aio-pika and py-amqp, each in its own Python environment.


def fetch_sdist(name: str, distribution: str, *more: str) -> Path:
    """Download a source distribution, and create an environment for its tests.

    Args:
        name: name of the folder in this package whose `requirements.txt` pins the release.
        distribution: name of the distribution in PyPI.
        more: further requirements to install in the environment.

    Returns:
        The folder in the cache, which contains `venv` and `source`.
    """
    folder = HERE / name
    pin = next(line for line in (folder / "requirements.txt").read_text().split() if line.startswith(distribution))
    archive = f"{pin.replace('-', '_').replace('==', '-')}.tar.gz"
    python = "venv/bin/python"
    return built(
        folder,
        [
            [sys.executable, "-m", "venv", "venv"],
            [python, "-m", "pip", "install", "-q", "-r", "requirements.txt", *more],
            [python, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", distribution, pin],
            ["tar", "xzf", archive, "--one-top-level=source", "--strip-components=1"],
        ],
    )


def fetch_aio_pika(*more: str) -> Path:
    """Download aio-pika as `fetch_sdist` does, and replace the module for the suite's containers."""
    folder = fetch_sdist("aio_pika", "aio-pika", *more)
    (folder / "source" / "tests" / "docker_client.py").write_bytes((folder / "docker_client.py").read_bytes())
    return folder


def run_pytest(folder: Path, port: int, *arguments: str, path: str = "") -> Outcomes:
    """Run tests of a downloaded suite with a broker on a port of this machine.

    Args:
        folder: folder that `fetch_sdist` has returned.
        port: port of the broker.
        arguments: arguments for pytest.
        path: value of PYTHONPATH.
    """
    report = folder / f"report-{port}.xml"
    report.unlink(missing_ok=True)
    _call(
        [
            *(str(folder / "venv/bin/python"), "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider"),
            *("-o", "log_cli=false", "-o", f"timeout={_TEST:.0f}", f"--junitxml={report}", *arguments),
        ],
        folder / "source",
        _SUITE,
        BROKER_PORT=str(port),
        RABBITMQ_HOST="127.0.0.1",
        RABBITMQ_5672_TCP=str(port),
        PYTHONPATH=path,
        PYTEST_ADDOPTS="",
    )
    return {test.removeprefix("pytest > "): passed for test, passed in _junit(report).items()}


def _run_aio_pika(folder: Path, port: int) -> Outcomes:
    # The broker has no TLS. The test of the memory collects garbage while aio-pika's own tasks still end: with both
    # brokers, 4 of 10 runs fail.
    unstable = "--deselect=tests/test_memory_leak.py::test_leak_unclosed_channel"
    return run_pytest(folder, port, "tests", "--ignore=tests/test_amqps.py", unstable)


def _run_py_amqp(folder: Path, port: int) -> Outcomes:
    return run_pytest(folder, port, "t/integration", "-k", "not tls")


SUITES: Final[dict[str, Suite]] = {
    "amqplib": Suite("amqplib 2.2.0", _fetch_amqplib, _run_amqplib, 330),
    "amqp091-go": Suite("amqp091-go 1.10.0", _fetch_amqp091_go, _run_amqp091_go, 125),
    "aio-pika": Suite("aio-pika 10.2.1", fetch_aio_pika, _run_aio_pika, 300),
    "py-amqp": Suite("py-amqp 5.4.2", lambda: fetch_sdist("py_amqp", "amqp"), _run_py_amqp, 45),
}


@contextmanager
def _qflow_broker() -> Iterator[int]:
    """Run `qflow broker` in a separate process, on a free port."""
    process = subprocess.Popen([sys.executable, "-m", "tests.interop.suites.broker"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield urlsplit(process.stdout.readline().strip()).port or 0
    finally:
        process.terminate()
        process.wait()


def differences(name: str, rabbitmq: Outcomes, ours: Outcomes) -> list[str]:
    """Return the unexpected results: tests that pass only on RabbitMQ, wrong entries of `DIFFERENT`, and too few tests.

    Args:
        name: name of the suite.
        rabbitmq: outcomes on RabbitMQ.
        ours: outcomes on the broker of this repository.
    """
    known = DIFFERENT.get(name, {})
    passed = {test for test, has_passed in rabbitmq.items() if has_passed}
    failed = {test for test in passed if not ours.get(test, False)}
    found = [f"passes on RabbitMQ and not here: {test}" for test in sorted(failed - known.keys())]
    found += [f"is in DIFFERENT and passes here: {test}" for test in sorted(known.keys() - failed) if ours.get(test)]
    found += [f"is in DIFFERENT and is no test: {test}" for test in sorted(known.keys() - rabbitmq.keys())]
    if len(passed) < SUITES[name].least:
        found.append(f"{len(passed)} tests pass on RabbitMQ, of at least {SUITES[name].least}: did the suite run?")
    return found


def parse_arguments(
    description: str, suites: Iterable[str], arguments: Sequence[str] | None
) -> tuple[Sequence[str], bool]:
    """Return the suites to run, and whether to print the outcome of each test."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=", ".join(suites))
    parser.add_argument("--json", action="store_true", help="print the outcome of each test, too")
    options = parser.parse_args(arguments)
    if unknown := set(options.suites) - set(suites):
        parser.error(f"unknown suite {', '.join(sorted(unknown))}; there are {', '.join(suites)}")
    return options.suites or list(suites), options.json


def main(arguments: Sequence[str] | None = None) -> int:
    """Run suites, print the result of each suite, and return the exit code."""
    names, as_json = parse_arguments(__doc__, SUITES, arguments)
    wrong: list[str] = []
    with RabbitMQNode() as node, _qflow_broker() as port:
        for name in names:
            suite = SUITES[name]
            folder = suite.fetch()
            rabbitmq = suite.run(folder, urlsplit(node.url).port or 5672)
            ours = suite.run(folder, port)
            if as_json:
                print(json.dumps({"rabbitmq": rabbitmq, "qflow": ours}, indent=1))
            passed = [test for test, has_passed in rabbitmq.items() if has_passed]
            found = differences(name, rabbitmq, ours)
            both = sum(ours.get(test, False) for test in passed)
            print(
                f"{suite.client}: {len(rabbitmq)} tests; {len(passed)} pass on RabbitMQ, {both} of them on the broker "
                f"here, {len(DIFFERENT.get(name, {}))} known differences",
                flush=True,
            )
            wrong += [f"{suite.client}: {each}" for each in found]
    print("\n".join(wrong) if wrong else "what passes on RabbitMQ passes here")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
