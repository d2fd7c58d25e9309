from __future__ import annotations

import asyncio
import multiprocessing
import os
import sqlite3
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from qflow_client import DeduplicationError, Deduplicator, may_be_second_copy
from qflow_client.message import REPUBLISHED
from tests.effort import rounds

PATIENCE = 20.0
IDS = st.sampled_from("abcdefgh")

Make = Callable[..., Deduplicator]


@pytest.fixture(params=["in memory", "on disk"])
def make(request, tmp_path: Path):
    made = []

    def make(**bounds) -> Deduplicator:
        made.append(Deduplicator(tmp_path / "ids" if request.param == "on disk" else None, **bounds))
        return made[-1]

    yield make
    for each in made:
        each.close()


class Lost(Exception):
    """The handler of a message failed."""


def handle(deduplicator: Deduplicator, message_id: str | None, *, fails: bool = False, look_up: bool = True) -> bool:
    """Return True if the message was handled, successfully or not."""
    is_first = False
    try:
        with deduplicator.first_time(message_id, look_up=look_up) as is_first:
            if is_first and fails:
                raise Lost
    except Lost:
        pass
    return is_first


def test_the_deduplicator_handles_a_message_once_and_drops_all_copies(make: Make) -> None:
    deduplicator = make()
    assert [handle(deduplicator, each) for each in "abab"] == [True, True, False, False]
    assert "a" in deduplicator
    assert "c" not in deduplicator
    assert len(deduplicator) == 2


def test_the_deduplicator_lets_a_message_whose_handler_failed_be_handled_again(make: Make) -> None:
    deduplicator = make()
    assert handle(deduplicator, "a", fails=True)
    assert "a" not in deduplicator
    assert handle(deduplicator, "a")
    assert not handle(deduplicator, "a")


@pytest.mark.parametrize("message_id", [None, ""])
def test_the_deduplicator_lets_all_messages_without_an_id_be_handled(make: Make, message_id: str | None) -> None:
    deduplicator = make()
    assert [handle(deduplicator, message_id) for _ in range(3)] == [True, True, True]
    assert len(deduplicator) == 0


def test_the_deduplicator_forgets_the_oldest_ids_beyond_the_maximum_count(make: Make) -> None:
    deduplicator = make(max_count=2)
    for each in "abc":
        deduplicator.remember(each)
    assert ("a" in deduplicator, "b" in deduplicator, "c" in deduplicator) == (False, True, True)


def test_with_look_up_false_a_copy_is_handled_and_its_id_is_remembered_for_later_copies(make: Make) -> None:
    deduplicator = make()
    assert handle(deduplicator, "a", look_up=False)
    assert handle(deduplicator, "a", look_up=False)
    assert not handle(deduplicator, "a")


@pytest.mark.parametrize(
    ("headers", "redelivered", "may"),
    [(None, False, False), (None, True, True), ({}, False, False), ({REPUBLISHED: True}, False, True)],
)
def test_the_headers_or_the_redelivered_flag_show_that_a_message_may_be_a_second_copy(
    headers, redelivered, may
) -> None:
    assert may_be_second_copy(headers, redelivered) is may


@pytest.mark.parametrize("fails", [False, True])
def test_a_copy_that_arrives_while_the_first_copy_is_handled_waits_and_is_handled_only_if_the_first_fails(
    make: Make, fails: bool
) -> None:
    deduplicator = make()
    results: list[bool] = []
    other = threading.Thread(target=lambda: results.append(handle(deduplicator, "a")))
    try:
        with deduplicator.first_time("a") as first:
            assert first
            other.start()
            # The thread waits here. Nothing else shows that it has come this far.
            while not deduplicator._handling["a"].waiters:
                other.join(0.001)
                assert other.is_alive()
            if fails:
                raise Lost
    except Lost:
        pass
    other.join(PATIENCE)
    assert not other.is_alive()
    assert results == [fails]


def test_a_thread_that_handles_a_message_inside_the_handler_of_the_same_message_gets_an_error(make: Make) -> None:
    deduplicator = make()
    with (
        deduplicator.first_time("a"),
        pytest.raises(RuntimeError, match="this thread already handles message 'a'"),
        deduplicator.first_time("a"),
    ):
        pass
    assert not handle(deduplicator, "a")


def test_coroutines_that_wait_for_the_handler_of_a_copy_do_not_block_their_event_loop(make: Make) -> None:
    deduplicator = make()

    async def consume(fails: bool) -> bool:
        is_first = False
        try:
            async with deduplicator.first_time("a") as is_first:
                # The other copies arrive and wait.
                await asyncio.sleep(0)
                if is_first and fails:
                    raise Lost
        except Lost:
            pass
        return is_first

    async def main() -> list[bool]:
        gone = asyncio.create_task(consume(False))
        results = asyncio.gather(consume(True), consume(False), consume(False))
        await asyncio.sleep(0)
        gone.cancel()
        return list(await results)

    assert asyncio.run(main()) == [True, True, False]


def test_a_coroutine_waits_for_a_thread_that_handles_a_copy_of_its_message(make: Make) -> None:
    deduplicator = make()
    may_end = threading.Event()
    has_begun = threading.Event()

    def in_thread() -> None:
        with deduplicator.first_time("a"):
            has_begun.set()
            assert may_end.wait(PATIENCE)

    async def main() -> bool:
        copy = asyncio.create_task(coroutine())
        # Its first step ends at the wait.
        await asyncio.sleep(0)
        assert deduplicator._handling["a"].waiters
        may_end.set()
        return await copy

    async def coroutine() -> bool:
        async with deduplicator.first_time("a") as is_first:
            return is_first

    thread = threading.Thread(target=in_thread)
    thread.start()
    assert has_begun.wait(PATIENCE)
    assert asyncio.run(main()) is False
    thread.join(PATIENCE)


def test_of_many_threads_exactly_one_handles_each_message(make: Make) -> None:
    deduplicator = make()
    handled: list[str] = []

    def consume() -> None:
        for number in range(300):
            if handle(deduplicator, str(number)):
                handled.append(str(number))

    threads = [threading.Thread(target=consume) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(handled, key=int) == [str(number) for number in range(300)]


@pytest.mark.parametrize(
    ("bounds", "words"),
    [({"max_count": 0}, "max_count must be more than 0"), ({"max_age": 0}, "max_age must be more than 0 seconds")],
)
def test_a_deduplicator_with_invalid_limits_raises_an_error(bounds, words) -> None:
    with pytest.raises(ValueError, match=words):
        Deduplicator(**bounds)


# On disk.


@pytest.mark.program
def test_a_deduplicator_file_remembers_exactly_the_messages_that_an_earlier_process_handled(tmp_path: Path) -> None:
    path = tmp_path / "ids"
    child = multiprocessing.get_context("spawn").Process(target=_die_half_way, args=(path,))
    child.start()
    child.join(PATIENCE)
    assert child.exitcode == 9
    with Deduplicator(path) as deduplicator:
        assert not handle(deduplicator, "handled")
        assert handle(deduplicator, "half handled")


def _die_half_way(path: Path) -> None:
    deduplicator = Deduplicator(path)
    handle(deduplicator, "handled")
    with deduplicator.first_time("half handled"):
        os._exit(9)


def test_an_expired_id_in_a_deduplicator_file_is_remembered_again_after_the_clock_was_set_back(tmp_path: Path) -> None:
    with Deduplicator(tmp_path / "ids", max_age=10) as deduplicator:
        for now, message_id in (1000.0, "early"), (100.0, "twice"), (111.0, "twice"):
            deduplicator._memory.clock = partial(float, now)
            assert handle(deduplicator, message_id)
        assert not handle(deduplicator, "twice")
        assert not handle(deduplicator, "early")


@pytest.mark.program
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_several_processes_share_one_deduplicator_file(tmp_path: Path) -> None:
    path = tmp_path / "ids"
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_remember, args=(path, number)) for number in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join(PATIENCE)
        assert child.exitcode == 0
    with Deduplicator(path) as deduplicator:
        assert len(deduplicator) == 4 * 100


def _remember(path: Path, number: int) -> None:
    with Deduplicator(path) as deduplicator:
        for each in range(100):
            deduplicator.remember(f"{number} {each}")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_a_forked_child_that_uses_the_deduplicator_of_its_parent_gets_an_error(tmp_path: Path) -> None:
    with Deduplicator(tmp_path / "ids") as deduplicator:
        child = os.fork()
        if not child:
            try:
                deduplicator.remember("a")
            except DeduplicationError as error:
                os._exit(7 if "which must open it again" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_file_that_is_no_deduplicator_file_is_left_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "mail"
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE mail (text TEXT)")
    other.commit()
    other.close()
    with pytest.raises(DeduplicationError, match="mail is a database of another application"):
        Deduplicator(path)
    path = tmp_path / "letter"
    path.write_text("Dear " * 1000)
    with pytest.raises(DeduplicationError, match="letter: file is not a database"):
        Deduplicator(path)
    with pytest.raises(DeduplicationError, match="nowhere"):
        Deduplicator(tmp_path / "nowhere" / "ids")


def test_a_deduplicator_file_of_an_unsupported_version_raises_an_error(tmp_path: Path) -> None:
    Deduplicator(tmp_path / "ids").close()
    other = sqlite3.connect(tmp_path / "ids")
    other.execute("PRAGMA user_version = 2")
    other.close()
    with pytest.raises(DeduplicationError, match="tables of version 2, but this qflow_client reads version 1"):
        Deduplicator(tmp_path / "ids")


def test_if_the_deduplicator_file_cannot_be_written_an_error_is_raised_and_the_message_is_handled_again(
    tmp_path: Path,
) -> None:
    with Deduplicator(tmp_path / "ids") as deduplicator:
        other = sqlite3.connect(tmp_path / "ids")
        other.execute("DROP TABLE handled")
        other.close()
        with pytest.raises(DeduplicationError, match="no such table"):
            handle(deduplicator, "a", look_up=False)
        assert deduplicator._handling == {}


# Against a model.


class Model(RuleBasedStateMachine):
    """A deduplicator remembers the same ids as an ordered list of ids and times with the same limits."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.now = 1000.0
        # When each id was handled, in that order.
        self.handled: dict[str, float] = {}

    @initialize(
        on_disk=st.booleans(),
        max_count=st.integers(1, 6),
        max_age=st.none() | st.integers(1, 6).map(float),
    )
    def make(self, on_disk: bool, max_count: int, max_age: float | None) -> None:
        self.path = Path(self.folder.name) / "ids" if on_disk else None
        self.max_count, self.max_age = max_count, max_age
        self.open()

    def open(self) -> None:
        self.deduplicator = Deduplicator(self.path, max_count=self.max_count, max_age=self.max_age)
        self.deduplicator._memory.clock = lambda: self.now

    def known(self) -> dict[str, float]:
        return {each: at for each, at in self.handled.items() if self.max_age is None or at > self.now - self.max_age}

    def model_add(self, message_id: str) -> None:
        self.handled = self.known()
        self.handled.setdefault(message_id, self.now)
        self.handled = dict(list(self.handled.items())[-self.max_count :])

    @rule(message_id=IDS, fails=st.booleans(), look_up=st.booleans())
    def handle(self, message_id: str, fails: bool, look_up: bool) -> None:
        is_first = handle(self.deduplicator, message_id, fails=fails, look_up=look_up)
        assert is_first == (not look_up or message_id not in self.known())
        if is_first and not fails:
            self.model_add(message_id)

    @rule(message_id=IDS)
    def remember(self, message_id: str) -> None:
        self.deduplicator.remember(message_id)
        self.model_add(message_id)

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.path is not None)
    @rule()
    def open_again(self) -> None:
        self.deduplicator.close()
        self.open()

    @invariant()
    def remembers_the_same(self) -> None:
        if hasattr(self, "deduplicator"):
            known = self.known()
            assert {each for each in "abcdefgh" if each in self.deduplicator} == set(known)
            assert len(self.deduplicator) == len(known) <= self.max_count

    def teardown(self) -> None:
        if hasattr(self, "deduplicator"):
            self.deduplicator.close()
        self.folder.cleanup()


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=rounds(60), stateful_step_count=30)
