"""Errors if Java is missing or too old."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qflow_client.spark import JavaMissing, check_java


def java(folder: Path, says: str) -> Path:
    """Create a program that prints `says` as its version."""
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho '{says}' >&2\n")
    program.chmod(0o755)
    return program


def test_JAVA_HOME_has_priority_over_PATH(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = java(tmp_path / "first", 'openjdk version "21.0.2" 2024-01-16')
    second = java(tmp_path / "second", 'openjdk version "17" 2021-09-14')
    monkeypatch.setenv("PATH", str(second.parent), prepend=os.pathsep)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    assert check_java() == second
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "first"))
    assert check_java() == first


def test_the_error_for_a_missing_java_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(JavaMissing, match="neither JAVA_HOME nor PATH leads to Java; install it"):
        check_java()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(JavaMissing, match="has no bin/java"):
        check_java()


@pytest.mark.parametrize(
    ("says", "words"),
    [('java version "1.8.0_392"', "is Java 8, and Spark needs 17"), ("Segmentation fault", "printed no version")],
)
def test_the_error_for_an_old_or_broken_java_names_the_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, words: str
) -> None:
    java(tmp_path, says)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(JavaMissing, match=words):
        check_java()


def test_importing_qflow_client_does_not_import_pyspark() -> None:
    code = "import qflow_client, sys; sys.exit('pyspark' in sys.modules or 'pyarrow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
