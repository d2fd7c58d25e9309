"""Plants faults in the deciding modules, one at a time, and counts how many of them the unit tests catch.

    tox -e mutants -- --sample 300 --seed 1
    tox -e mutants -- --sample 300 --seed 1 --tests v1.0    # the same faults, with the tests of another commit

cosmic-ray creates the faults: it replaces an operator, a comparison, a number or a keyword by another. The selection
depends only on the seed and the source, so the tests of two commits can be compared. Each fault is tested in a clone,
so the work tree does not change. Annotations are left out, because they are not evaluated.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]

#: Source files, each with the tests that must catch faults in the file.
TARGETS: Final = {
    "qflow_client/flow/*.py": ("tests/unit/flow",),
    "qflow_client/amqp/frames.py": ("tests/unit/frames",),
    "qflow_client/amqp/fields.py": ("tests/unit/frames",),
    "qflow_client/amqp/coalescing.py": ("tests/unit/core/test_coalescing.py",),
    "qflow_client/amqp/tap.py": ("tests/unit/core/test_tap.py", "tests/unit/fuzz/test_client.py"),
}
# If the tests run longer than this number of seconds, the fault counts as caught.
_LIMIT: Final = 300.0


@dataclass(frozen=True, order=True)
class Mutant:
    """A fault to plant.

    Args:
        path: the source file, relative to the root of the repository
        operator: cosmic-ray's name of the replacement
        occurrence: number of the fault among those with the same operator in the file, from 0
        line: line of the fault
        tests: paths of the tests that must catch the fault
    """

    path: str
    operator: str
    occurrence: int
    line: int
    tests: tuple[str, ...]


def all_mutants(root: Path) -> Iterator[Mutant]:
    """Yield every possible fault in the targets, in an order that depends only on the source."""
    from cosmic_ray import plugins
    from cosmic_ray.ast import ast_nodes, get_ast_from_path

    for pattern, tests in TARGETS.items():
        for path in sorted(root.glob(pattern)):
            skipped = list(find_annotations(path.read_text(encoding="utf-8")))
            nodes = list(ast_nodes(get_ast_from_path(path)))
            for name in sorted(plugins.operator_names()):
                operator_class = plugins.get_operator(name)
                if operator_class.arguments() or name == "core/NoOp":
                    continue
                operator = operator_class()
                places = (place for node in nodes for place in operator.mutation_positions(node))
                for occurrence, (start, _) in enumerate(places):
                    if not any(first <= start < last for first, last in skipped):
                        yield Mutant(str(path.relative_to(root)), name, occurrence, start[0], tests)


def find_annotations(source: str) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield the start and the end of each annotation as (line, column). The end is after the last character."""
    for node in ast.walk(ast.parse(source)):
        for each in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if each is not None:
                yield (each.lineno, each.col_offset), (each.end_lineno, each.end_col_offset)


def try_mutant(mutant: Mutant, clone: Path) -> str:
    """Return the result of a fault: ``killed``, ``survived`` or ``incompetent``."""
    from cosmic_ray.mutating import mutate_and_test
    from cosmic_ray.work_item import MutationSpec

    os.chdir(clone)
    os.environ["PYTHONPATH"] = str(clone)
    os.environ.pop("PYTEST_ADDOPTS", None)
    spec = MutationSpec(
        module_path=mutant.path,
        operator_name=mutant.operator,
        occurrence=mutant.occurrence,
        start_pos=(1, 0),
        end_pos=(1, 1),
    )
    command = f"{sys.executable} -m pytest -x -q -p no:cacheprovider {' '.join(mutant.tests)}"
    result = mutate_and_test([spec], command, _LIMIT)
    return str((result.test_outcome or result.worker_outcome).value)


def _work(mutants: Sequence[Mutant], clone: Path, record: Path) -> None:
    """Test faults in one clone, and write a line for each fault to the file `record`."""
    for mutant in mutants:
        begun = time.monotonic()
        outcome = try_mutant(mutant, clone)
        line = json.dumps({**asdict(mutant), "outcome": outcome, "seconds": round(time.monotonic() - begun, 1)})
        with record.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def _clone(folder: Path, tests: str | None) -> None:
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)
    if tests is not None:
        subprocess.run(["git", "rm", "-rq", "tests"], cwd=folder, check=True)
        subprocess.run(["git", "checkout", "-q", tests, "--", "tests"], cwd=folder, check=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Select faults, test those that are not in the record yet, and print how many were caught."""
    parser = argparse.ArgumentParser(prog="tox -e mutants --", description=__doc__.partition("\n")[0])
    parser.add_argument("--sample", type=int, default=300, help="number of faults to select (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random selection (%(default)s)")
    parser.add_argument("--tests", help="use the tests of this commit instead of HEAD")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="number of parallel tests (%(default)s)")
    parser.add_argument("--least", type=int, default=0, help="fail if fewer faults are caught (%(default)s)")
    parser.add_argument("--record", type=Path, help="file of results; faults that it contains are not tested again")
    options = parser.parse_args(arguments)
    named = subprocess.run(
        ["git", "rev-parse", "--short=10", options.tests or "HEAD"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    record = options.record or ROOT / "build" / f"mutants-{options.sample}-{options.seed}-{named}.jsonl"
    record.parent.mkdir(parents=True, exist_ok=True)

    every = list(all_mutants(ROOT))
    drawn = sorted(random.Random(options.seed).sample(every, min(options.sample, len(every))))
    keys = ("path", "operator", "occurrence")
    lines = record.read_text(encoding="utf-8").splitlines() if record.exists() else []
    done = {tuple(found[key] for key in keys): found for found in map(json.loads, lines)}
    left = [mutant for mutant in drawn if (mutant.path, mutant.operator, mutant.occurrence) not in done]
    print(f"{len(drawn)} of {len(every)} faults, tests of {named}; {len(left)} to try", flush=True)
    if left:
        with tempfile.TemporaryDirectory(prefix="qflow-mutants-") as name, ProcessPoolExecutor(options.jobs) as pool:
            futures = []
            for number in range(options.jobs):
                clone = Path(name) / str(number)
                _clone(clone, options.tests)
                futures.append(pool.submit(_work, left[number :: options.jobs], clone, record))
            for future in futures:
                future.result()
    found = {
        key: result
        for result in map(json.loads, record.read_text(encoding="utf-8").splitlines())
        if (key := tuple(result[name] for name in keys)) in {(m.path, m.operator, m.occurrence) for m in drawn}
    }
    survived = [result for result in found.values() if result["outcome"] == "survived"]
    for result in survived:
        print(f"survived: {result['path']}:{result['line']} {result['operator']}")
    killed = len(found) - len(survived)
    print(f"{killed} of {len(drawn)} caught by the tests of {named}, {len(survived)} not")
    return 0 if killed >= options.least and len(found) == len(drawn) else 1


if __name__ == "__main__":
    sys.exit(main())
