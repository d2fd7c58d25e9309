"""Runs long checks in parts, and writes a dated record of each part to `docs/nightly/`.

    tox -e nightly                      # every part that has not passed on this code
    tox -e nightly -- soak spark        # these parts
    tox -e nightly -- --list            # print the parts and their last runs

A part takes at most two hours and is a list of steps. A step that has passed is not repeated on the same code, so an
interrupted part continues at the next step. The record of a part has the date, the commit, and the last output line of
each step. `docs/nightly.md` is created from the records.

Two commits have the same code if they differ only in `docs/`. So a record can be committed without a new run.

A step may print lines such as ``proved: 3,000 kills of producers``. When the step has passed, its numbers are added to
`docs/nightly/totals.jsonl`, which has a line for each run of a step. The page has their sums.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from checks.change import find_python, first_on_path
from checks.repeat import commit_of
from checks.stages import PASSED, Stage, run_stage

ROOT: Final = Path(__file__).parents[1]
RECORDS: Final = ROOT / "docs" / "nightly"
PAGE: Final = ROOT / "docs" / "nightly.md"
#: Name of the file in `RECORDS` with the numbers of all runs.
TOTALS: Final = "totals.jsonl"
#: Folder for the records of parts that have not passed yet.
UNFINISHED: Final = ROOT / "build" / "nightly"

_TOX: Final = f"{sys.executable} -m tox"
_PYTHON: Final = ".tox/interop/bin/python"
_HOUR: Final = 3600.0
# With these variables a test makes more effort than in CI, and may take longer.
_NIGHTLY: Final = {"QFLOW_EFFORT": "nightly", "PYTEST_ADDOPTS": "-o timeout=3600"}
_MANY_MESSAGES: Final = f"{_PYTHON} -m benchmarks.soak --minutes 5 --rate 50000 --many 200"
_MORE_MESSAGES: Final = f"{_PYTHON} -m benchmarks.soak --minutes 1 --rate 300000 --many 2000"
_COMPATIBILITY: Final = {"QFLOW_COMPATIBILITY": "docs/compatibility.json"}
_SUITES: Final = ("amqplib", "amqp091-go", "aio-pika", "py-amqp")
_REQUIRED: Final = {"CI": "true", "QFLOW_REQUIRE_BROKERS": "1", "QFLOW_REQUIRE_BROWSER": "1"}


@dataclass(frozen=True)
class Part:
    """Steps that are run and recorded together.

    Args:
        steps: steps in order; the first failure ends the part
    """

    title: str
    steps: Sequence[Stage]


def _step(name: str, script: str, environment: Mapping[str, str] | None = None, *, hours: float = 1.0) -> Stage:
    return Stage(name, script, limit=hours * _HOUR, environment=environment or {})


def _pythons() -> Iterator[Stage]:
    """Yield a step for each Python on this machine. If Python 3.14 is missing, its step uses a Debian container."""
    for version in ("3.11", "3.12", "3.13", "3.14"):
        name = f"py{version.replace('.', '')}"
        if (found := find_python(version)) is not None:
            yield _step(f"Python {version}", f"{_TOX} -e {name}", first_on_path(found))
        elif version == "3.14":
            tox = f"python{version} -m venv /tmp/v && /tmp/v/bin/pip install -q tox tox-uv && /tmp/v/bin/tox"
            script = f".ci/containers python {version} '{tox} --workdir .tox/container -e {name}'"
            yield _step(f"Python {version}", f".ci/containers start\n{script}")


def _cluster(seeds: Iterable[int]) -> Part:
    return Part(
        "a RabbitMQ cluster whose nodes are killed, suspended and cut off from each other under load",
        [
            _step("environment", f"{_TOX} -e interop --notest"),
            *(
                _step(
                    f"seed {seed}",
                    "history=$(mktemp)\n"
                    f"{_PYTHON} -m benchmarks.soak --minutes 10 --broker cluster --seed {seed} --history $history\n"
                    f"{_PYTHON} -m benchmarks.soak.history $history\n"
                    "rm $history",
                )
                for seed in seeds
            ),
        ],
    )


PARTS: Final[Mapping[str, Part]] = {
    "properties": Part(
        "properties, simulations, fuzzing and kills at 30 times the rounds of CI",
        [
            _step("unit", f"{_TOX} -e py -- tests/unit", _NIGHTLY, hours=1.5),
            _step("integration", f"{_TOX} -e py -- tests/integration", _NIGHTLY, hours=1.5),
        ],
    ),
    "dependencies": Part(
        "the default suite on every Python, with the oldest and the newest dependencies",
        [
            *_pythons(),
            _step("oldest", f"{_TOX} -e lowest"),
            _step("newest", f"{_TOX} -e newest"),
            _step("releases of pika", f"{_TOX} -e pika13,pika14,pika15"),
        ],
    ),
    "interop": Part(
        "real brokers, clients of other projects, all 336,776 flights",
        [
            _step("containers", ".ci/containers start && .ci/containers images"),
            _step(
                "contract and clients",
                f"{_TOX} -e interop -- --ignore=tests/interop/flights tests/interop",
                {**_COMPATIBILITY, **_NIGHTLY},
                hours=1.5,
            ),
            _step(
                "flights",
                f"{_TOX} -e interop -- tests/interop/flights",
                {**_COMPATIBILITY, **_NIGHTLY},
                hours=1.5,
            ),
            _step("page of compatibility", f"{_PYTHON} -m tests.interop.matrix"),
        ],
    ),
    "soak": Part(
        "connections cut and brokers killed under load, with ten million messages",
        [
            _step("environment", f"{_TOX} -e interop --notest"),
            _step("RabbitMQ", f"{_PYTHON} -m benchmarks.soak --minutes 20 --broker rabbitmq --seed $RANDOM"),
            _step("messages, RabbitMQ", f"{_MANY_MESSAGES} --broker rabbitmq --messages 2e6 --seed $RANDOM"),
            _step("messages, embedded", f"{_MANY_MESSAGES} --broker embedded --messages 8e6 --seed $RANDOM", hours=1.5),
        ],
    ),
    "messages": Part(
        "connections cut and brokers killed under load, with fifteen million messages",
        [
            _step("environment", f"{_TOX} -e interop --notest"),
            *(
                _step(f"messages {number}", f"{_MORE_MESSAGES} --broker embedded --messages 5e6 --seed $RANDOM")
                for number in range(1, 4)
            ),
        ],
    ),
    "cluster": _cluster(range(5)),
    "cluster-2": _cluster(range(5, 10)),
    "kills": Part(
        "producers with an outbox, killed with -9",
        [
            _step("environment", f"{_TOX} -e interop --notest"),
            _step("producers", f"{_PYTHON} -m benchmarks.kills --kills 10000 --seed $RANDOM --folder /tmp", hours=1.5),
            _step("qflow send", f"{_PYTHON} -m benchmarks.send_kills --kills 200 --seed $RANDOM --folder /tmp"),
            _step("qflow send, refused", f"{_PYTHON} -m benchmarks.send_kills --refusals --seed $RANDOM --folder /tmp"),
            _step("qflow send, CSV", f"{_PYTHON} -m benchmarks.send_kills --format csv --seed $RANDOM --folder /tmp"),
            _step("relays", f"{_PYTHON} -m benchmarks.relay_kills --kills 200 --seed $RANDOM"),
            _step("relays and RabbitMQ", f"{_PYTHON} -m benchmarks.relay_kills --kills 200 --broker rabbitmq"),
            _step("outages of relays", f"{_PYTHON} -m benchmarks.relay_outages --broker rabbitmq"),
        ],
    ),
    "fuzz": Part(
        "bytes that atheris chooses, to the client and to the broker",
        [
            _step(target, f"{_TOX} -e fuzz -- {target} --bytes 1e9 --minutes 55 --seed $RANDOM")
            for target in ("client", "broker")
        ],
    ),
    "damage": Part(
        "message stores with flipped bits, and cut ones",
        [
            _step("environment", f"{_TOX} -e interop --notest"),
            _step("stores", f"{_PYTHON} -m benchmarks.damage --flips 1000 --cuts 100 --seed $RANDOM"),
        ],
    ),
    "suites": Part(
        "the suites of amqplib, amqp091-go, aio-pika and py-amqp on RabbitMQ and on qflow broker",
        [
            _step("environment", f"{_TOX} -e interop --notest"),
            *(_step(name, f"{_PYTHON} -m tests.interop.suites.run {name}", hours=2.0) for name in _SUITES),
        ],
    ),
    "drop-ins": Part(
        "the suites of aio-pika and kombu through the drop-ins; frameworks under an alarm, and 100 connections cut",
        [
            _step("environment", f"{_TOX} -e interop --notest"),
            _step("kombu", f"{_PYTHON} -m tests.interop.suites.dropins kombu"),
            _step("aio-pika", f"{_PYTHON} -m tests.interop.suites.dropins aio-pika", hours=2.0),
            _step("frameworks", f"{_PYTHON} -m benchmarks.frameworks --cuts 100", hours=1.5),
        ],
    ),
    "spark": Part(
        "Spark at size",
        [
            _step("tests", f"{_TOX} -e spark", _NIGHTLY, hours=1.5),
            _step("depth", ".tox/spark/bin/python -m benchmarks.spark depth --rows 3000000 --partitions 2"),
        ],
    ),
    "spark-nodes": Part(
        "Spark with RabbitMQ nodes killed under it",
        [
            _step("environment", f"{_TOX} -e spark --notest"),
            _step("kills of nodes", ".tox/spark/bin/python -m benchmarks.spark_nodes"),
        ],
    ),
    "browser": Part("the console in Chromium", [_step("console", f"{_TOX} -e browser", _NIGHTLY)]),
    "mutants": Part(
        "300 planted faults: how many the unit tests catch",
        [_step("mutants", f"{_TOX} -e mutants -- --sample 300 --seed 1", hours=2.0)],
    ),
}


@dataclass
class Record:
    """The results of a part.

    Args:
        commit: tested commit
        date: UTC date of the last step
        machine: description of the machine
        steps: name, script, outcome, seconds and last line of each step, and what it has proved
    """

    part: str
    commit: str
    date: str = ""
    machine: str = ""
    steps: list[dict[str, Any]] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        done = [step["name"] for step in self.steps if step["outcome"] == PASSED]
        return done == [step.name for step in PARTS[self.part].steps]


def is_same_code(commit: str) -> bool:
    """Return True if a commit and the work tree differ only in `docs/`."""
    done = subprocess.run(
        ["git", "diff", "--quiet", commit, "--", ".", ":!docs"], cwd=ROOT, capture_output=True, check=False
    )
    return done.returncode == 0


def load(path: Path) -> Record | None:
    """Return the record in a file, or None if the file does not exist."""
    return Record(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def save(record: Record, folder: Path) -> None:
    """Write a record."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record.part}.json"
    path.write_text(json.dumps(asdict(record), indent=2) + "\n", encoding="utf-8")


def run_part(name: str) -> Record:
    """Run the steps of a part that have not passed on this code, and return its record."""
    record = load(UNFINISHED / f"{name}.json")
    if record is None or not is_same_code(record.commit.rstrip("+")) or record.commit.endswith("+"):
        record = Record(name, commit_of(ROOT, but="docs"))
    record.steps = [step for step in record.steps if step["outcome"] == PASSED]
    passed = {step["name"] for step in record.steps}
    for step in PARTS[name].steps:
        if step.name in passed:
            continue
        print(f"--- {name}: {step.name}", flush=True)
        log = UNFINISHED / f"{name}-{step.name.replace(' ', '-')}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        ended = run_stage(step, ROOT, log)
        record.steps.append(
            {
                "name": step.name,
                "script": step.script.replace(sys.executable, "python"),
                "outcome": ended.outcome,
                "seconds": round(ended.seconds),
                "said": last_line(said := log.read_text(encoding="utf-8", errors="replace")),
                "proved": proved(said),
            }
        )
        record.date = datetime.now(UTC).date().isoformat()
        record.machine = f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"
        save(record, UNFINISHED)
        print(f"    {ended.outcome}, {ended.seconds:.0f} s; {log}", flush=True)
        if ended.outcome != PASSED:
            break
        # Do this after `save`, so that an interrupted part never adds the same numbers twice.
        add_to_totals(record)
    return record


def last_line(text: str) -> str:
    """Return the last line of a step's output that counts passed tests, or else the last line."""
    lines = [line.strip("= ") for line in text.splitlines() if line.strip("= ")]
    # The last lines of tox have only the durations of its environments.
    told = [line for line in lines if " passed" in line and " in " in line]
    return (told or lines or [""])[-1]


def proved(text: str) -> dict[str, int]:
    """Return the numbers in a step's output that belong to the totals, by what was counted."""
    found: Counter[str] = Counter()
    for number, what in re.findall(r"^proved: ([\d,]+) (.+)$", text, re.MULTILINE):
        found[what] += int(number.replace(",", ""))
    return dict(found)


def add_to_totals(record: Record) -> None:
    """Add a line with the numbers of the last step, if it has any."""
    step = record.steps[-1]
    if step["proved"]:
        line = {"date": record.date, "commit": record.commit, "part": record.part, "step": step["name"]}
        RECORDS.mkdir(parents=True, exist_ok=True)
        with (RECORDS / TOTALS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line | {"proved": step["proved"]}) + "\n")


def render_totals(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of the page with the sums over all runs."""
    lines = [
        "## Totals",
        "",
        "The sums over all runs without a failure. `docs/nightly/totals.jsonl` has the date and commit of each run.",
        "",
        "| what | number | runs | first | last |",
        "|---|---:|---:|---|---|",
    ]
    for what in dict.fromkeys(what for run in runs for what in run["proved"]):
        each = [run for run in runs if what in run["proved"]]
        number = sum(run["proved"][what] for run in each)
        lines.append(f"| {what} | {number:,} | {len(each)} | {each[0]['date']} | {each[-1]['date']} |")
    return [*lines, ""]


def render(records: Mapping[str, Record | None], runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the page from the records, and from the lines of the totals."""
    lines = [
        "# Nightly runs",
        "",
        "Long checks run in parts with `tox -e nightly`, not with every change. This page is generated from the",
        "records of the last run of each part, in `docs/nightly/`. The commit is the tested one.",
        "",
        *render_totals(runs),
    ]
    for name, part in PARTS.items():
        record = records.get(name)
        lines += [f"## {name}", "", f"{part.title[0].upper()}{part.title[1:]}.", ""]
        if record is None:
            lines += ["This part has no record yet.", ""]
            continue
        lines += [
            f"{record.date}, commit `{record.commit}`, {record.machine}: "
            + ("passed." if all(step["outcome"] == PASSED for step in record.steps) else "**failed**."),
            "",
            "| step | outcome | seconds | last line |",
            "|---|---|---|---|",
        ]
        lines += [
            f"| {step['name']} | {step['outcome']} | {step['seconds']:,} | {step['said'].replace('|', chr(92) + '|')} |"
            for step in record.steps
        ]
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"


def load_all() -> dict[str, Record | None]:
    """Return the record of each part."""
    return {name: load(RECORDS / f"{name}.json") for name in PARTS}


def load_totals() -> list[dict[str, Any]]:
    """Return the lines of the totals."""
    path = RECORDS / TOTALS
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def main(arguments: Sequence[str] | None = None) -> int:
    """Run parts, write their records and the page, and return the exit code."""
    parser = argparse.ArgumentParser(prog="tox -e nightly --", description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help="; ".join(f"{n}: {p.title}" for n, p in PARTS.items()))
    parser.add_argument("--list", action="store_true", help="print the parts and their last runs, and run nothing")
    parser.add_argument("--page", action="store_true", help="write the page from the records, and run nothing")
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown part {', '.join(sorted(unknown))}; the parts are {', '.join(PARTS)}")
    if options.list:
        for name, record in load_all().items():
            print(f"{name:14}", f"{record.date} {record.commit}" if record else "never", PARTS[name].title)
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ.update(_REQUIRED)
    failed = []
    for name in [] if options.page else options.parts or PARTS:
        kept = load(RECORDS / f"{name}.json")
        if not options.parts and kept is not None and kept.passed and is_same_code(kept.commit):
            print(f"--- {name}: passed on {kept.date} on the same code", flush=True)
            continue
        record = run_part(name)
        save(record, RECORDS)
        if record.passed:
            (UNFINISHED / f"{name}.json").unlink()
        else:
            failed.append(name)
    PAGE.write_text(render(load_all(), load_totals()), encoding="utf-8")
    print(f"FAILED: {', '.join(failed)}" if failed else "All passed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
