"""Test files are compiled before many processes need them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from checks import warm


@pytest.mark.program
def test_each_new_test_file_is_compiled_to_bytecode_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # No plugin is needed, and some take seconds to load.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setattr(warm, "_FEW", 3)
    monkeypatch.setattr(warm, "_CHARACTERS", f"open({str(tmp_path / 'characters')!r}, 'w')")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    files = [tmp_path / f"test_{number}.py" for number in range(3)]
    for file in files:
        file.write_text("def test_it(): assert True\n")
    assert warm.cold([tmp_path]) == warm.cold(files) == files
    assert warm.main([str(tmp_path)]) == 0
    assert warm.cold([tmp_path]) == []
    assert (tmp_path / "characters").exists()


def test_no_compiler_process_is_started_if_only_few_test_files_need_compilation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", fail)
    (tmp_path / "test_0.py").write_text("")
    assert warm.main([str(tmp_path), "-k", "x"]) == 0
