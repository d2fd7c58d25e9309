"""E8: only the owner can read files that contain messages, and no file is written through a symbolic link."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qflow_client import FlowLog, Outbox, OutboxError, QflowError
from qflow_client.broker import StoreError
from qflow_client.broker.store.store import Store
from qflow_client.database import LockFile
from qflow_client.dedup import Deduplicator


@pytest.fixture(params=[0o000, 0o022, 0o277], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    try:
        yield request.param
    finally:
        os.umask(before)


def modes(folder: Path) -> dict[str, str]:
    found = {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in folder.iterdir() if path.is_file()}
    assert found
    return found


def all_private(folder: Path) -> bool:
    return set(modes(folder).values()) == {"0o600"}


@pytest.mark.usefixtures("umask")
def test_E8_the_files_of_an_outbox_are_private_to_their_owner(tmp_path: Path) -> None:
    with Outbox(tmp_path / "orders.outbox") as outbox:
        outbox.put(b"x", "", "q", "one")
        outbox.commit()
        assert modes(tmp_path).keys() == {f"orders.outbox{end}" for end in ("", "-wal", "-shm", "-lock")}
        assert all_private(tmp_path)
    assert all_private(tmp_path)


@pytest.mark.usefixtures("umask")
def test_E8_the_files_of_a_store_are_private_to_their_owner(tmp_path: Path) -> None:
    store = Store(tmp_path / "broker.store")
    assert modes(tmp_path).keys() == {f"broker.store{end}" for end in ("", "-wal", "-shm", "-lock")}
    assert all_private(tmp_path)
    store.close()
    assert all_private(tmp_path)


@pytest.mark.usefixtures("umask")
def test_E8_the_files_of_a_flow_log_are_private_to_their_owner(tmp_path: Path) -> None:
    with FlowLog(tmp_path) as log:
        log.write({"at": 1})
        log.flush()
        assert all_private(tmp_path)
    assert all_private(tmp_path)


def test_E8_an_existing_database_file_keeps_its_mode_and_the_wal_file_gets_the_same_mode(tmp_path: Path) -> None:
    path = tmp_path / "orders.outbox"
    Outbox(path).close()
    path.chmod(0o640)
    with Outbox(path) as outbox:
        outbox.put(b"x", "", "q", "one")
        outbox.commit()
        found = modes(tmp_path)
    assert (found["orders.outbox"], found["orders.outbox-wal"], found["orders.outbox-lock"]) == (
        "0o640",
        "0o640",
        "0o600",
    )


def test_E8_the_target_of_an_outbox_path_that_is_a_symbolic_link_is_created_private(tmp_path: Path) -> None:
    target = tmp_path / "there"
    target.mkdir()
    (tmp_path / "orders.outbox").symlink_to(target / "file")
    Outbox(tmp_path / "orders.outbox").close()
    assert modes(target).keys() == {"file", "file-lock"}
    assert all_private(target)


OPEN: dict[str, tuple[Callable[[Path], Any], type[QflowError]]] = {
    "outbox": (Outbox, OutboxError),
    "store": (Store, StoreError),
}


@pytest.mark.parametrize("kind", OPEN)
@pytest.mark.parametrize("exists", [True, False])
def test_E8_a_lock_file_that_is_a_symbolic_link_raises_an_error_and_the_target_is_not_changed(
    kind: str, exists: bool, tmp_path: Path
) -> None:
    make, error = OPEN[kind]
    path, victim = tmp_path / "file", tmp_path / "victim"
    if exists:
        victim.write_text("precious")
    (tmp_path / "file-lock").symlink_to(victim)
    with pytest.raises(error, match=rf"{tmp_path}/file-lock is a symbolic link; remove it"):
        make(path)
    assert victim.read_text() == "precious" if exists else not victim.exists()
    assert not path.exists()


@pytest.mark.parametrize("kind", OPEN)
def test_E8_a_lock_file_with_foreign_content_raises_an_error_and_is_not_changed(kind: str, tmp_path: Path) -> None:
    make, error = OPEN[kind]
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "file-lock").hardlink_to(victim)
    with pytest.raises(error, match=rf"{tmp_path}/file-lock is not a lock file of qflow_client; move it away"):
        make(tmp_path / "file")
    assert victim.read_text() == "precious"
    (tmp_path / "file-lock").unlink()
    os.mkfifo(tmp_path / "file-lock")
    with pytest.raises(error, match="is not a lock file"):
        make(tmp_path / "file")


def test_a_lock_file_left_by_a_process_or_a_crash_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for left in ("", "1", "123\n", "4194304", f"{os.getpid():<20}", "\0" * 20):
        (tmp_path / "file-lock").write_text(left)
        lock = LockFile(path, error=QflowError, in_use=QflowError, told=("another", "wait"))
        assert (tmp_path / "file-lock").read_text().strip() == str(os.getpid())
        with pytest.raises(QflowError, match="is used by another in this process; wait"):
            LockFile(path, error=QflowError, in_use=QflowError, told=("another", "wait"))
        lock.release()


@pytest.mark.usefixtures("umask")
def test_E8_the_files_of_a_deduplicator_are_private_to_their_owner(tmp_path: Path) -> None:
    deduplicator = Deduplicator(tmp_path / "seen")
    assert all_private(tmp_path)
    deduplicator.close()


def test_E8_files_are_created_on_a_file_system_without_permissions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "fchmod", refuse)
    with Outbox(tmp_path / "orders.outbox") as outbox:
        outbox.put(b"x", "", "q", "one")
    with FlowLog(tmp_path / "log"):
        pass
    assert all_private(tmp_path)
