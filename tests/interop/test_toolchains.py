"""Building programs in other languages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interop import toolchains
from tests.interop.toolchains import BuildFailed, ToolchainNotInstalled, built, tool
from tests.trust import TRUSTED


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one file, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "program"
    folder.mkdir()
    (folder / "main").write_text("one", encoding="utf-8")
    return folder


def test_the_error_for_a_missing_tool_names_its_package() -> None:
    with pytest.raises(ToolchainNotInstalled, match=r"no-such-tool was not found: .*apt-get install the-package"):
        tool("no-such-tool", "the-package")


def test_a_program_is_built_once_and_again_when_its_source_changes(sources: Path) -> None:
    steps = [["sh", "-c", "cat main >> made"], ["sh", "-c", "cat main >> made"]]
    folder = built(sources, steps)
    assert (folder / "made").read_text(encoding="utf-8") == "oneone"
    assert built(sources, steps) == folder
    assert (folder / "made").read_text(encoding="utf-8") == "oneone"
    (sources / "main").write_text("two", encoding="utf-8")
    assert (built(sources, steps) / "made").read_text(encoding="utf-8") == "twotwo"
    assert not (sources / "made").exists()


def test_build_steps_trust_the_certificate_authorities_of_the_system(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TRUSTED, "SSL_CERT_FILE", "the authorities")
    monkeypatch.setitem(TRUSTED, "SSL_CERT_DIR", None)
    folder = built(sources, [["sh", "-c", "echo $SSL_CERT_FILE ${SSL_CERT_DIR-not set} > made"]])
    assert (folder / "made").read_text(encoding="utf-8") == "the authorities not set\n"


def test_the_error_of_a_failed_build_step_contains_its_output_and_no_file_is_kept(
    sources: Path, tmp_path: Path
) -> None:
    with pytest.raises(BuildFailed, match=r"sh -c echo .* failed \(1\):\n  fetching\n  no such release"):
        built(sources, [["sh", "-c", "echo fetching; echo no such release >&2; exit 1"]])
    assert list((tmp_path / "cache" / "qflow-client" / "clients").iterdir()) == []


def test_if_a_build_step_times_out_its_processes_are_killed_and_the_error_contains_its_output(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchains, "_TIMEOUT", 3.0)
    with pytest.raises(BuildFailed, match=r"did not end within 3 s:\n  no answer yet"):
        # The shell waits for a child process, which has the output open.
        built(sources, [["sh", "-c", "echo no answer yet; sleep 1000; echo"]])
    assert list((tmp_path / "cache" / "qflow-client" / "clients").iterdir()) == []
