"""A damaged store (E10): every message is correct or reported. Every start succeeds, or its error says what to do."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path
from struct import pack

import pytest
from pamqp import commands

from qflow_client.broker.core.entries import DropReason
from qflow_client.broker.store.errors import StoreError
from qflow_client.broker.store.journal import Batch, Journal, Put
from qflow_client.broker.store.recovery import Recovery
from qflow_client.broker.store.store import BodyReader, Store
from qflow_client.broker.store.topologylog import Change
from tests.effort import rounds

from ..conftest import Disk, World

HEADER = pack(">HHQH", 60, 0, 3, 1 << 12) + b"\2"
NAMES = b"\0\1q"


def body(number: int) -> bytes:
    return b"%d " % number + bytes(number % 7 * 900)


def filled(path: Path, messages: int = 40) -> None:
    store = Store(path, synchronous="normal")
    changes = [Change("queue", (number, name, False, bytes(4))) for number, name in ((1, "q"), (2, "r"))]
    changes.append(Change("exchange", ("e", "direct", False, False, bytes(4))))
    changes += [Change("binding", ("e", "queue", name, "key", bytes(4))) for name in "qr"]
    puts = [Put(each, [1, 2] if each % 2 else [1], 1.5, NAMES, HEADER, body(each)) for each in range(1, messages + 1)]
    store.write(Batch(changes=changes, puts=puts))
    store.write(Batch(moves={1: [2]}))
    store.close()


def change(path: Path, statement: str) -> None:
    with sqlite3.connect(path) as file:
        assert file.execute(statement).rowcount == 1
    file.close()


def found(path: Path) -> tuple[World, dict[int, bytes], list[str]]:
    """Start a broker with the store. Return the broker, all bodies by number, and the damaged objects."""
    store = Store(path, synchronous="normal")
    try:
        world = World(journal=Journal(float))
        journal = world.host.journal
        assert isinstance(journal, Journal)
        recovery = Recovery(world.host, journal, world.wall_clock)
        recovery.recover_topology(store.topology())
        messages = list(store.messages())
        recovery.recover_messages(messages)
        store.set_aside_messages(recovery.lost, "its queues are not there")
        store.end_deletions(recovery.leftovers)
        recovery.finish()
        return world, {each.number: each.body for each in messages}, store.damaged
    finally:
        store.close()


def test_E10_messages_of_a_queue_whose_row_is_lost_are_reported_and_those_of_a_deleted_queue_are_removed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "store"
    store = Store(path, synchronous="normal")
    puts = [Put(number, queues, 0.0, NAMES, HEADER, b"") for number, queues in ((1, [7]), (2, [7, 8]), (3, [8]))]
    store.write(Batch([Change("deleted", (7,))], puts))
    store.close()
    world, _, damaged = found(path)
    assert damaged == [f"message {number}: its queues are not there" for number in (2, 3)]
    assert world.host.declare_queue("q", durable=True).number == 9
    assert found(path)[1] == {}


def check(path: Path, messages: int = 40) -> None:
    """Check that every message is correct or reported."""
    try:
        _, bodies, damaged = found(path)
    except StoreError:
        return
    assert all(bodies[number] == body(number) for number in bodies)
    assert len(bodies) + sum("message" in each for each in damaged) >= messages


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("UPDATE message SET body = CAST('5 !' AS BLOB) WHERE number = 5", "message 5"),
        ("UPDATE message SET header = x'00' WHERE number = 5", "message 5"),
        ("UPDATE message SET names = x'05' WHERE number = 5", "message 5"),
        ("UPDATE message SET at = 2.5 WHERE number = 5", "message 5"),
        ("UPDATE message SET at = 'x' WHERE number = 5", "message 5"),
        ("UPDATE message SET queues = '[2]' WHERE number = 5", "message 5"),
        ("UPDATE message SET queues = CAST(x'5b31ff' AS TEXT) WHERE number = 5", "message 5"),
        ("UPDATE message SET number = 500 WHERE number = 5", "message 500"),
    ],
)
def test_a_damaged_message_in_the_store_is_moved_aside_and_all_other_messages_are_kept(tmp_path, statement, named):
    path = tmp_path / "store"
    filled(path)
    change(path, statement)
    world, bodies, damaged = found(path)
    assert bodies == {number: body(number) for number in range(1, 41) if number != 5}
    assert (world.queue().depth, world.queue("r").depth) == (38, 19)
    (why,) = damaged
    assert named in why
    # The message is moved aside once, and reported at each start.
    _, again, reported = found(path)
    assert (again, reported) == (bodies, damaged)


@pytest.mark.parametrize(
    ("statement", "left", "count"),
    [
        ("UPDATE queue SET name = 'other' WHERE number = 1", {"r"}, 1 + 1 + 20),
        ("UPDATE queue SET name = CAST(x'ff' AS TEXT) WHERE number = 1", {"r"}, 1 + 1 + 20),
        ("UPDATE queue SET arguments = x'00' WHERE number = 2", {"q"}, 1 + 1 + 1),
        ("UPDATE exchange SET type = 'topic'", {"q", "r"}, 1 + 2),
        ("UPDATE binding SET routing_key = 'other' WHERE destination = 'q'", {"q", "r"}, 1),
    ],
)
def test_the_bindings_and_messages_of_a_damaged_queue_or_exchange_are_moved_aside_with_it(
    tmp_path, statement, left, count
):
    path = tmp_path / "store"
    filled(path)
    change(path, statement)
    world, _, damaged = found(path)
    assert set(world.host.queues) == left
    assert len(damaged) == count
    # Objects that are declared again are kept.
    store = Store(path, synchronous="normal")
    store.write(Batch(changes=[Change("queue", (9, "other", False, bytes(4)))]))
    assert "other" in [queue[1] for queue in store.topology().queues]
    store.close()


@pytest.mark.parametrize("seed", range(rounds(60)))
def test_a_flipped_bit_in_the_store_never_changes_a_body_without_an_error(tmp_path, seed):
    path = tmp_path / "store"
    filled(path)
    content = bytearray(path.read_bytes())
    chance = random.Random(seed)
    for _ in range(8):
        at, bit = chance.randrange(len(content)), 1 << chance.randrange(8)
        content[at] ^= bit
        path.write_bytes(content)
        check(path)
        content[at] ^= bit
        for other in tmp_path.iterdir():
            other.unlink()


def test_a_store_whose_sql_schema_is_damaged_raises_an_error_that_says_to_restore_it(tmp_path):
    path = tmp_path / "store"
    filled(path)
    content = path.read_bytes()
    at = content.index(b"CREATE TABLE message")
    for bad in (
        b"CREATE TABLE me\xd5sage",
        b"CREATE TABL\xd5 message",
        b"CREATE TABLE missage",
        b"CREATE TABLE message (\n        number INTEGEP",
    ):
        path.write_bytes(content[:at] + bad + content[at + len(bad) :])
        with pytest.raises(StoreError, match="restore"):
            found(path)
        for other in tmp_path.glob("store-*"):
            other.unlink()
    column = content.index(b"checksum INTEGER NOT NULL,\n        names")
    path.write_bytes(content[:column] + b"c\xd5" + content[column + 2 :])
    with pytest.raises(StoreError, match="restore"):
        found(path)


def test_a_store_of_an_earlier_commit_gets_the_table_of_deleted_queues(tmp_path: Path) -> None:
    path = tmp_path / "store"
    filled(path)
    with sqlite3.connect(path) as file:
        file.execute("DROP TABLE deleted")
    file.close()
    for _ in range(2):
        world, bodies, damaged = found(path)
        assert (sorted(world.host.queues), len(bodies), damaged) == (["q", "r"], 40, [])


@pytest.mark.parametrize("size", [1, 20, 100, 511, 512, 4095, 4096, 5000, 8192, 20_000])
def test_opening_a_truncated_store_raises_an_error_instead_of_starting_with_an_empty_store(tmp_path, size):
    path = tmp_path / "store"
    filled(path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(StoreError, match="restore"):
        found(path)


def test_a_body_that_was_damaged_on_disk_is_reported_when_it_is_read(tmp_path):
    path = tmp_path / "store"
    filled(path)
    change(path, "UPDATE message SET body = CAST('5 !' AS BLOB) WHERE number = 5")
    reader = BodyReader(path)
    assert reader.read([4, 5, 999]) == {4: body(4), 5: None}
    reader.close()


@pytest.mark.parametrize("way", ["consume", "get", "get_no_ack", "reject"])
def test_a_message_whose_body_cannot_be_read_from_disk_leaves_the_queue_and_blocks_no_other_message(way):
    journal = Journal(float)
    world, disk = World(journal=journal), Disk(journal)
    journal.on_lost = world.host.lost
    client = world.client().channel()
    world.host.declare_queue("dead")
    arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
    client.declare(arguments=arguments)
    for number in range(3):
        client.publish(b"%d" % number)
    for entry in world.queue().contents.oldest_first():
        journal.evict(entry.message)
    disk.write()
    (first, *_) = disk.bodies
    disk.bodies[first] = None
    if way == "consume":
        client.consume()
    else:
        client.send(1, commands.Basic.Get(queue="q", no_ack=way == "get_no_ack"))
    disk.read()
    if way == "consume":
        assert [content for _, content, _ in client.deliveries_after_ok()] == [b"1", b"2"]
    else:
        assert client.names() == ["Basic.GetEmpty"]
        client.send(1, commands.Basic.Get(queue="q"))
        disk.read()
        assert client.names() == ["Basic.GetOk", "ContentHeader", "ContentBody"]
    if way == "reject":
        client.send(1, commands.Basic.Nack(0, multiple=True, requeue=False))
        disk.read()
        assert world.queue("dead").depth == 1
    # A message that is consumed without acks has already left its queue.
    assert world.queue().contents.drops.get(DropReason.DAMAGED, 0) == (way != "get_no_ack")
    assert journal.damaged == 1


def test_an_expired_message_whose_body_cannot_be_read_from_disk_counts_as_dropped_once():
    journal = Journal(float)
    world, disk = World(journal=journal), Disk(journal)
    journal.on_lost = world.host.lost
    client = world.client().channel()
    client.declare(arguments={"x-dead-letter-exchange": "", "x-message-ttl": 1000})
    client.publish()
    contents = world.queue().contents
    journal.evict(contents.ready[0].message)
    disk.write()
    disk.bodies = dict.fromkeys(disk.bodies)
    world.tick(2)
    disk.read()
    world.tick(3)
    assert journal.damaged == 1
    assert not world.host.dead_letters.is_waiting
    assert (contents.dropped, contents.drops) == (1, {DropReason.EXPIRED: 1})


@pytest.mark.parametrize("name", ["store", "store-lock", "store-wal"])
def test_a_store_writes_nothing_after_one_of_its_files_was_deleted_or_replaced(tmp_path: Path, name: str) -> None:
    path = tmp_path / "store"
    store = Store(path, synchronous="normal")
    batch = Batch(changes=[Change("queue", (1, "q", False, bytes(4)))])
    (tmp_path / name).rename(tmp_path / "aside")
    with pytest.raises(StoreError, match=f"{name} was deleted, moved or replaced"):
        store.write(batch)
    (tmp_path / "aside").rename(tmp_path / name)
    store.write(batch)
    store.close()


def test_a_store_writes_nothing_after_its_folder_was_replaced_by_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    store = Store(folder / "store", synchronous="normal")
    folder.rename(tmp_path / "aside")
    folder.touch()
    with pytest.raises(StoreError, match="store was deleted, moved or replaced"):
        store.write(Batch(changes=[Change("queue", (1, "q", False, bytes(4)))]))
    store.close()


def test_a_store_writes_nothing_if_its_file_was_replaced_while_it_was_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(store: Store) -> None:
        store.path.rename(tmp_path / "aside")
        store.path.touch()

    monkeypatch.setattr(Store, "_check_tables", check)
    store = Store(tmp_path / "store", synchronous="normal")
    with pytest.raises(StoreError, match="store was deleted, moved or replaced"):
        store.write(Batch(changes=[Change("queue", (1, "q", False, bytes(4)))]))
    store.close()


def test_a_file_with_hard_links_is_not_opened_as_a_store(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", synchronous="normal")
    (tmp_path / "other").hardlink_to(tmp_path / "store")
    with pytest.raises(StoreError, match="other has several hard links, or is a mount point, so two brokers"):
        Store(tmp_path / "other")
    store.close()


def test_a_store_with_a_relative_path_can_be_written_after_a_change_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = Store("store", synchronous="normal")
    monkeypatch.chdir("/")
    store.write(Batch(changes=[Change("queue", (1, "q", False, bytes(4)))]))
    store.close()
