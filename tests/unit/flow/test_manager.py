"""The registry of flow resources (F1): inspected, stopped and started as a whole (D5)."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

import pytest

from qflow_client.flow import FlowManager, Gate

#: Seconds after which a thread is considered stuck.
STUCK = 10.0


class Resource:
    """A gate with a lock, like a producer."""

    def __init__(self, name: str = "resource") -> None:
        self.name = name
        self.gate = Gate()
        self.lock = threading.Lock()

    def hold(self, kind: str, *, source: str, detail: str) -> None:
        with self.lock:
            self.gate.hold(kind, now=0.0, source=source, detail=detail)

    def lift(self, kind: str, *, source: str) -> None:
        with self.lock:
            self.gate.lift(kind, now=1.0, source=source)

    @property
    def is_stopped(self) -> bool:
        return self.gate.is_held_by(FlowManager.HOLD)


def run_together(*jobs: Callable[[], object]) -> None:
    """Run each function in a separate thread, all at once, and raise the error of one of them."""
    barrier = threading.Barrier(len(jobs))
    errors: list[BaseException] = []

    def run(job: Callable[[], object]) -> None:
        try:
            barrier.wait(STUCK)
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(STUCK)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def test_D5_stop_all_stops_all_registered_resources_and_start_all_starts_them() -> None:
    manager, resources = FlowManager("operator"), [Resource() for _ in range(3)]
    for resource in resources:
        manager.register(resource)
    assert not manager.is_stopped
    assert manager.stop_all("stock-taking") == 3
    assert manager.is_stopped
    for resource in resources:
        (hold,) = resource.gate.holds
        assert (hold.kind, hold.source, hold.detail) == ("paused", "operator", "stock-taking")
    assert manager.start_all() == 3
    assert not manager.is_stopped
    assert all(resource.gate.is_open for resource in resources)


def test_D5_a_resource_that_registers_after_stop_all_is_stopped() -> None:
    manager, late, later = FlowManager(), Resource(), Resource()
    manager.stop_all("why")
    manager.register(late)
    assert late.gate.holds[0].detail == "why"
    manager.start_all()
    assert late.gate.is_open
    manager.register(later)
    assert later.gate.is_open


def test_D5_start_all_lifts_only_the_holds_that_stop_all_raised() -> None:
    manager, resource = FlowManager("operator"), Resource()
    manager.register(resource)
    resource.hold("paused", source="", detail="by the application itself")
    manager.stop_all()
    manager.start_all()
    assert [hold.detail for hold in resource.gate.holds] == ["by the application itself"]


def test_D5_one_start_all_is_sufficient_after_two_stop_all() -> None:
    manager, resource = FlowManager(), Resource()
    manager.register(resource)
    manager.stop_all("first")
    manager.stop_all("second")
    assert [hold.detail for hold in resource.gate.holds] == ["first"]
    manager.start_all()
    assert resource.gate.is_open
    manager.start_all()
    assert resource.gate.is_open


def test_D5_a_manager_does_not_start_resources_that_a_manager_with_another_name_stopped() -> None:
    here, there, resource = FlowManager("here"), FlowManager("there"), Resource()
    for manager in (here, there):
        manager.register(resource)
        manager.stop_all()
    here.start_all()
    assert resource.is_stopped
    there.start_all()
    assert not resource.is_stopped


def test_F5_the_flow_manager_lists_all_registered_resources() -> None:
    manager, one, two = FlowManager(), Resource("one"), Resource("two")
    assert not manager.resources
    for resource in (one, two, two):
        manager.register(resource)
    assert sorted(resource.name for resource in manager.resources) == ["one", "two"]
    manager.unregister(one)
    manager.unregister(one)
    assert manager.resources == (two,)
    assert manager.stop_all() == 1
    assert one.gate.is_open


class Broken(Resource):
    """A resource that cannot be stopped or started."""

    def hold(self, kind: str, *, source: str, detail: str) -> None:
        raise OSError("no hold")

    def lift(self, kind: str, *, source: str) -> None:
        raise OSError("no lift")


def test_D5_if_a_resource_cannot_be_stopped_or_started_it_is_reported_and_all_others_are_handled() -> None:
    manager = FlowManager("operator")
    sound, broken = [Resource() for _ in range(5)], [Broken(f"broken {number}") for number in range(2)]
    for resource in (*sound, *broken):
        manager.register(resource)
    with pytest.raises(ExceptionGroup, match="2 of 7 resources could not be stopped, but the others were") as stopping:
        manager.stop_all()
    assert all(resource.is_stopped for resource in sound)
    assert manager.is_stopped
    assert [str(error) for error in stopping.value.exceptions] == ["no hold", "no hold"]
    notes = sorted(note for error in stopping.value.exceptions for note in error.__notes__)
    assert notes == ["'broken 0' could not be stopped", "'broken 1' could not be stopped"]
    with pytest.raises(ExceptionGroup, match="2 of 7 resources could not be started, but the others were") as starting:
        manager.start_all()
    assert not any(resource.is_stopped for resource in sound)
    assert not manager.is_stopped
    assert [str(error) for error in starting.value.exceptions] == ["no lift", "no lift"]


def test_D5_registering_a_resource_that_cannot_be_stopped_raises_an_error_while_all_are_stopped() -> None:
    manager, broken = FlowManager(), Broken()
    manager.stop_all()
    with pytest.raises(OSError, match="no hold"):
        manager.register(broken)
    assert not manager.resources
    assert manager.start_all() == 0
    manager.register(broken)
    assert manager.resources == (broken,)


def test_D5_a_resource_that_unregisters_while_all_resources_are_stopped_is_started() -> None:
    manager, goes, stays = FlowManager("operator"), Resource("goes"), Resource("stays")
    for resource in (goes, stays):
        manager.register(resource)
    goes.hold("paused", source="", detail="by the application itself")
    manager.stop_all()
    manager.unregister(goes)
    assert [hold.source for hold in goes.gate.holds] == [""], "its own hold stays"
    assert stays.is_stopped
    manager.register(goes)
    assert len(goes.gate.holds) == 2
    manager.start_all()
    assert len(goes.gate.holds) == 1


def test_D5_unregistering_a_resource_that_was_never_registered_does_not_change_it() -> None:
    manager, other, stranger = FlowManager("operator"), FlowManager("operator"), Resource()
    for each in (manager, other):
        each.stop_all()
    other.register(stranger)
    manager.unregister(stranger)
    assert stranger.is_stopped


def test_D5_a_resource_that_another_resource_unregisters_during_stop_all_is_not_left_stopped() -> None:
    manager = FlowManager()

    class Selfish(Resource):
        """A resource that ends another one when it is stopped itself."""

        other: Selfish | None = None

        def hold(self, kind: str, *, source: str, detail: str) -> None:
            super().hold(kind, source=source, detail=detail)
            assert self.other is not None
            manager.unregister(self.other)

    one, two = Selfish("one"), Selfish("two")
    one.other, two.other = two, one
    for resource in (one, two):
        manager.register(resource)
    assert manager.stop_all() == 1
    (left,) = manager.resources
    assert {resource for resource in (one, two) if resource.is_stopped} == {left}


def test_the_flow_manager_keeps_no_reference_that_prevents_the_collection_of_a_resource() -> None:
    manager, stays, goes = FlowManager(), Resource("stays"), Resource("goes")
    gone = weakref.ref(goes)
    manager.register(stays)
    manager.register(goes)
    manager.stop_all()
    manager.start_all()
    del goes
    gc.collect()
    assert gone() is None
    assert manager.resources == (stays,)
    assert manager.stop_all() == 1


def test_a_resource_may_be_garbage_collected_during_any_call_of_the_flow_manager() -> None:
    manager = FlowManager()
    finalized = threading.Event()

    class Finalized(Resource):
        def __del__(self) -> None:
            manager.unregister(self)
            assert not manager.resources or self not in manager.resources
            finalized.set()

    class Trigger(Resource):
        """A resource in whose `hold` the garbage collector runs."""

        def hold(self, kind: str, *, source: str, detail: str) -> None:
            super().hold(kind, source=source, detail=detail)
            doomed.clear()

    trigger = Trigger()
    doomed = [Finalized()]
    manager.register(trigger)
    run_together(manager.stop_all)
    assert finalized.is_set()


def test_D5_a_resource_that_registers_during_stop_all_is_stopped() -> None:
    manager, late = FlowManager(), Resource("late")
    stopping, go_on = threading.Event(), threading.Event()

    class Slow(Resource):
        def hold(self, kind: str, *, source: str, detail: str) -> None:
            stopping.set()
            assert go_on.wait(STUCK)
            super().hold(kind, source=source, detail=detail)

    slow = Slow("slow")
    manager.register(slow)

    def register_in_the_middle() -> None:
        assert stopping.wait(STUCK)
        go_on.set()
        manager.register(late)

    run_together(manager.stop_all, register_in_the_middle)
    assert slow.is_stopped
    assert late.is_stopped


class NoticedLock:
    """A lock that reports when a second thread must wait for it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.somebody_waits = threading.Event()

    def __enter__(self) -> None:
        if not self.lock.acquire(blocking=False):
            self.somebody_waits.set()
            self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def test_D5_a_resource_that_registers_during_start_all_is_started() -> None:
    manager = FlowManager()
    lock = NoticedLock()
    manager._lock = lock  # type: ignore[assignment]
    manager.stop_all()
    registering, started = threading.Event(), lock.somebody_waits

    class Slow(Resource):
        def hold(self, kind: str, *, source: str, detail: str) -> None:
            registering.set()
            # The other thread has come as far as it can: it waits for this one, or has passed, which would be the
            # mistake.
            assert started.wait(STUCK)
            super().hold(kind, source=source, detail=detail)

    slow = Slow()

    def start_in_the_middle() -> None:
        assert registering.wait(STUCK)
        manager.start_all()
        started.set()

    run_together(lambda: manager.register(slow), start_in_the_middle)
    assert not slow.is_stopped


def test_D5_with_many_threads_a_resource_is_stopped_exactly_while_the_flow_manager_is_stopped() -> None:
    manager = FlowManager()
    rounds = 60
    kept: list[list[Resource]] = [[] for _ in range(4)]

    def register_many(mine: list[Resource]) -> Callable[[], None]:
        def job() -> None:
            for number in range(rounds):
                resource = Resource(f"{number}")
                manager.register(resource)
                if number % 3 == 0:
                    manager.unregister(resource)
                elif number % 3 == 1:
                    mine.append(resource)
                # The others are collected while threads look at the registry.

        return job

    def stop_and_start() -> None:
        for _ in range(rounds):
            manager.stop_all("why")
            manager.start_all()
            assert all(resource.name for resource in manager.resources)

    for last in (manager.stop_all, manager.start_all):
        run_together(*map(register_many, kept), stop_and_start, stop_and_start)
        count = last()
        registered = [resource for mine in kept for resource in mine]
        assert count == len(registered) == len(manager.resources)
        assert {resource.is_stopped for resource in registered} == {manager.is_stopped}


def test_a_forked_child_can_register_resources_even_if_threads_of_the_parent_held_locks() -> None:
    manager, held, go_on = FlowManager(), threading.Event(), threading.Event()
    resource = Resource("in the child")

    def hold() -> None:
        with manager._lock:
            held.set()
            go_on.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(20)
    manager.forked()
    manager.register(resource)
    assert not go_on.is_set()
    assert resource in manager.resources
    go_on.set()
    thread.join()
