"""When and where a lost connection is tried again, and when the producer gives up."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from qflow_client import ProducerSettings
from qflow_client.recovery import Backoff, Reconnection, Return, Watch, hosts_in_order, is_final, retries
from qflow_client.returning import Returner

HOSTS = ["amqp://u:secret@one/", "amqp://u:secret@two/"]


def reconnection(host: int = 0, **settings: object) -> Reconnection:
    given = ProducerSettings(**({"url": HOSTS, "reconnect_jitter": 0, "reconnect_delay": 1} | settings))  # type: ignore[arg-type]
    return Reconnection(given, given.urls, host)


def test_reconnect_delays_double_up_to_the_maximum() -> None:
    backoff = Backoff(0.5, 3.0, 0.0)
    backoff.begin(100.0)
    assert [backoff.pause(100.0) for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    backoff.begin(200.0)
    assert backoff.pause(200.0) == 0.5


def test_jitter_lengthens_every_reconnect_delay_but_not_beyond_the_maximum() -> None:
    backoff = Backoff(0.5, 3.0, 0.5)
    backoff.begin(0.0)
    first = backoff.pause(0.0)
    assert first is not None
    assert 0.5 <= first <= 0.75
    later = [backoff.pause(0.0) or 0 for _ in range(50)][5:]
    assert min(later) >= 2.0
    assert max(later) <= 3.0
    assert len(set(later)) > 40


def test_the_last_reconnect_delay_ends_at_the_time_limit() -> None:
    backoff = Backoff(1.0, 60.0, 0.0, 5.0)
    backoff.begin(10.0)
    assert [backoff.pause(now) for now in (10.0, 11.0, 13.0, 15.0)] == [1.0, 2.0, 2.0, None]


def test_with_a_time_limit_of_0_no_attempt_to_reconnect_is_made() -> None:
    lost = reconnection(reconnect_timeout=0)
    assert lost.lost("cut", 1.0) is None
    assert lost.verdict == "cut"


def test_the_delay_before_reconnects_grows_after_each_round_of_hosts_that_begins_with_the_lost_host() -> None:
    tries = reconnection(host=1)
    tries.opened(0.0)
    assert tries.lost("cut", 100.0) == 1.0
    seen = []
    for _ in range(5):
        seen.append((tries.host, tries.failed("refused", False, 101.0)))
    assert seen == [(1, 0.0), (0, 2.0), (1, 0.0), (0, 4.0), (1, 0.0)]
    tries.opened(110.0)
    assert (tries.host, tries.url) == (0, "amqp://u:***@one/")


def test_a_connection_that_is_lost_soon_does_not_reset_the_reconnect_delays() -> None:
    tries = reconnection(reconnect_delay_max=30)
    tries.opened(0.0)
    pauses = []
    now = 100.0
    for _ in range(3):
        pauses.append(tries.lost("cut", now))
        tries.opened(now)
        now += 29.0
    tries.opened(now)
    assert pauses == [1.0, 2.0, 4.0]
    assert tries.lost("cut", now + 30.0) == 1.0


def test_E15_after_each_failed_connect_the_next_ip_address_of_the_host_name_is_tried_first() -> None:
    tries = reconnection(url="amqp://name/", connect_timeout=6)
    assert tries.addresses(["a"]) == (["a"], 6.0)
    seen = []
    for _ in range(4):
        seen.append("".join(tries.addresses(["a", "b", "c"])[0]))
        tries.failed("silent", False, 1.0)
    assert seen == ["abc", "bca", "cab", "abc"]
    # The address that accepts the producer is also the first one after that.
    tries.opened(2.0)
    tries.lost("cut", 3.0)
    assert tries.addresses(["a", "b", "c"]) == (["b", "c", "a"], 2.0)
    tries.move_on()
    assert tries.addresses(["a", "b", "c"]) == (["c", "a", "b"], 2.0)


def test_reconnecting_ends_when_all_hosts_report_permanent_errors() -> None:
    tries = reconnection()
    assert tries.lost("the connection is lost: cut", 0.0) == 1.0
    assert tries.failed("403 ACCESS_REFUSED", True, 1.0) == 0.0
    assert tries.failed("refused", False, 1.0) == 2.0
    assert tries.failed("403 ACCESS_REFUSED", True, 3.0) == 0.0
    assert tries.failed("530 NOT_ALLOWED", True, 3.0) is None
    assert tries.verdict == (
        "the connection is lost: cut; connecting is not possible: amqp://u:***@one/: 403 ACCESS_REFUSED; "
        "amqp://u:***@two/: 530 NOT_ALLOWED"
    )


def test_a_refused_login_is_not_a_permanent_error_if_the_credentials_can_be_renewed() -> None:
    given = ProducerSettings(url=HOSTS[0], reconnect_jitter=0, reconnect_delay=1)
    tries = Reconnection(given, given.urls, 0, credentials_change=True)
    assert tries.lost("cut", 0.0) == 1.0
    assert tries.failed("403 ACCESS_REFUSED", True, 1.0) == 2.0
    assert tries.last == "403 ACCESS_REFUSED"
    tries.opened(3.0)
    assert tries.last == ""


def test_reconnecting_ends_at_the_time_limit_and_the_error_contains_the_last_failure() -> None:
    tries = reconnection(url=HOSTS[0], reconnect_timeout=3)
    assert tries.lost("cut", 0.0) == 1.0
    assert tries.failed("refused", False, 1.0) == 2.0
    assert tries.failed("still refused", False, 3.0) is None
    assert tries.verdict == "cut; connecting did not succeed within 3 s: amqp://u:***@one/: still refused"


@pytest.mark.parametrize(
    ("code", "text", "expected"),
    [
        (403, "ACCESS_REFUSED - Login was refused using authentication mechanism PLAIN.", True),
        (530, "NOT_ALLOWED - vhost nosuch not found", True),
        (530, "NOT_ALLOWED - access to vhost '/' refused for user 'guest': connection limit (1) is reached", False),
        (404, "NOT_FOUND - no such virtual host", True),
        (320, "CONNECTION_FORCED - broker forced connection closure with reason 'shutdown'", False),
        (541, "INTERNAL_ERROR - access to vhost '/' refused for user 'guest': vhost '/' is down", False),
    ],
)
def test_each_connection_close_of_the_broker_is_classified_as_permanent_or_temporary(
    code: int, text: str, expected: bool
) -> None:
    assert is_final(code, text) is expected


def test_the_delay_before_a_closed_channel_is_reopened_grows_until_a_channel_settles_messages() -> None:
    tries = reconnection()
    assert [tries.channel_closed(settled, 0.0) for settled in (0, 0, 0, 1, 1, 2)] == [0.0, 1.0, 2.0, 0.0, 1.0, 0.0]


def test_nacked_messages_are_retried_unless_on_refused_is_fail_or_confirms_are_off() -> None:
    pauses = retries(ProducerSettings(retry_delay=2, retry_delay_max=3, reconnect_jitter=0))
    assert pauses is not None
    pauses.begin(0.0)
    assert [pauses.pause(0.0) for _ in range(3)] == [2.0, 3.0, 3.0]
    assert retries(ProducerSettings(on_refused="fail")) is None
    assert retries(ProducerSettings(confirms=False)) is None


# The choice of hosts, and when to leave a host (E15).


def watch(hosts: int = 2, **settings: object) -> Watch:
    made = Watch(ProducerSettings(**settings), hosts)  # type: ignore[arg-type]
    made.opened(100.0)
    return made


def look(
    watch: Watch, now: float, *, heard_at: float = 100.0, due: bool = True, blocked: bool = False, settled: int = 0
) -> str | None:
    return watch.look(now, heard_at=heard_at, is_due=due, is_blocked=blocked, settled=settled)


def test_E15_with_host_order_shuffled_each_producer_has_the_same_hosts_in_a_random_order() -> None:
    hosts = [f"amqp://host{number}/" for number in range(20)]
    assert hosts_in_order(ProducerSettings(url=hosts)) == tuple(hosts)
    orders = {hosts_in_order(ProducerSettings(url=hosts, host_order="shuffled")) for _ in range(5)}
    assert len(orders) > 1
    assert all(sorted(order) == sorted(hosts) for order in orders)


def test_E15_a_producer_that_leaves_its_host_tries_the_next_host_first() -> None:
    tries = reconnection()
    tries.move_on()
    assert (tries.host, tries.host_url) == (1, HOSTS[1])
    tries.lost("silent", 1.0)
    tries.failed("refused", False, 1.0)
    assert tries.host == 0


def test_E15_a_producer_probes_a_broker_with_overdue_confirms_and_leaves_it_if_it_does_not_answer() -> None:
    one = watch(hosts=1, liveness=8.0)
    assert one.period == 1.0
    assert [look(one, now) for now in (107.9, 108.0, 111.9)] == [None, "", None]
    assert look(one, 112.0) == "the broker has sent nothing for 12 s, although confirms are due and a probe was sent"


def test_E15_a_broker_is_left_only_after_a_time_without_any_answer_in_which_confirms_were_overdue() -> None:
    one = watch(liveness=8.0)
    assert look(one, 108.0) == ""
    # The answer to the probe.
    assert look(one, 109.0, heard_at=108.5) is None
    assert look(one, 117.0, heard_at=108.5) == ""
    assert look(one, 118.0, heard_at=108.5, due=False) is None
    assert look(one, 125.9, heard_at=108.5) is None
    assert look(one, 126.0, heard_at=108.5) == ""


def test_E15_a_producer_does_not_leave_a_silent_broker_that_has_sent_connection_blocked() -> None:
    one = watch(liveness=8.0)
    assert one.period == 1.0
    assert look(one, 108.0) == ""
    assert [look(one, now, blocked=True) for now in (112.0, 500.0)] == [None, None]
    assert [look(one, now) for now in (507.0, 508.0)] == [None, ""]


def test_E15_if_all_hosts_block_the_connection_the_producer_waits_longer_before_each_change_of_hosts() -> None:
    hosts = watch(hosts=3, on_blocked="failover", failover_delay=4.0)
    now, left = 100.0, []
    for _ in range(7):
        hosts.opened(now)
        began = now
        while look(hosts, now, blocked=True) is None:
            now += hosts.period or 0
        left.append(now - began)
    assert left == [4.0, 4.0, 8.0, 8.0, 16.0, 16.0, 32.0]
    # A host that takes messages ends the growth of the delay.
    hosts.opened(now)
    assert look(hosts, now, settled=1) is None
    assert look(hosts, now + 1.0, blocked=True, settled=1) is None
    words = "the broker has blocked the connection for 4 s, and there are other hosts"
    assert look(hosts, now + 5.0, blocked=True, settled=1) == words


@pytest.mark.parametrize(
    ("hosts", "settings"), [(1, {"on_blocked": "failover"}), (2, {})], ids=["one host", "on_blocked='wait'"]
)
def test_E15_a_blocked_connection_is_kept_without_a_second_host_or_without_on_blocked_failover(
    hosts: int, settings: dict[str, object]
) -> None:
    one = watch(hosts, **settings)
    assert one.period is None
    assert look(one, 1e6, blocked=True) is None
    assert look(one, 2e6, blocked=True) is None
    assert look(one, 3e6) is None


# Returning to the first host (E15).


def returning(hosts: int = 2, **settings: object) -> Return:
    return Return(ProducerSettings(**({"return_to_first": 60.0} | settings)), hosts)  # type: ignore[arg-type]


def returns(rule: Return, begin: float, end: float, down: tuple[float, float] = (0.0, 0.0)) -> float | None:
    """Return when a producer that is connected to another host from `begin` on returns; None if not before `end`."""
    assert rule.period is not None
    rule.opened(1, begin)
    now = begin
    while (now := now + rule.period) <= end:
        if rule.probed(not down[0] <= now < down[1], now):
            return now
    return None


def test_E15_a_producer_returns_to_the_first_host_when_that_host_has_answered_for_long_enough() -> None:
    rule = returning()
    assert rule.period == 15.0
    assert returns(rule, 0.0, 1000.0, down=(0.0, 300.0)) == 360.0


def test_E15_a_producer_does_not_return_to_a_first_host_that_answers_only_sometimes() -> None:
    rule = returning()
    rule.opened(1, 0.0)
    assert not any(rule.probed(step % 4 != 0, 15.0 * step) for step in range(1000))


def test_E15_a_short_stay_on_the_first_host_doubles_the_wait_for_the_next_return_and_a_long_stay_resets_it() -> None:
    rule = returning()
    now, waits = 0.0, []
    for kept in (None, 59.0, 1.0, 1.0, 1.0, 1.0, 1.0, 60.0, 1.0):
        at = returns(rule, now, now + 1e4)
        assert at is not None
        # From the first answer on.
        waits.append(at - now - 15.0)
        now = at
        if kept is not None:
            rule.opened(0, now)
            now += kept
    assert waits == [60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 1920.0, 1920.0, 60.0]


def test_E15_a_time_in_which_the_first_host_blocks_the_connection_does_not_make_its_stay_long() -> None:
    host = watch(on_blocked="failover", failover_delay=80.0)
    assert [look(host, now, blocked=True) for now in (150.0, 229.0)] == [None, None]
    assert look(host, 230.0, blocked=True)
    assert host.served_until == 150.0
    rule = returning()
    now, waits = 0.0, []
    for kept in (10.0, 10.0, 60.0, 0.0):
        at = returns(rule, now, now + 1e4)
        assert at is not None
        waits.append(at - now - 15.0)
        rule.opened(0, at)
        rule.served_until(at + kept)
        now = at + kept + 80.0
    assert waits == [60.0, 120.0, 240.0, 60.0]


def test_E15_a_time_without_a_connection_does_not_make_the_stay_on_the_first_host_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    tries = reconnection(return_to_first=60.0)
    unused: Any = Mock()
    returner = Returner(tries, ProducerSettings(url=HOSTS, return_to_first=60.0), unused, unused, unused)
    returner._return._returns = 1
    returner.begin()
    now = 10.0
    returner.end()
    now = 90.0
    # Each failed try to connect calls `end`, too.
    returner.end()
    tries.host = 1
    returner.begin()
    assert returner._return._returns == 1


def test_E15_reopening_a_channel_does_not_change_when_a_producer_returns_to_the_first_host() -> None:
    rule = returning()
    rule.opened(1, 0.0)
    for now in (15.0, 30.0, 45.0, 60.0):
        assert not rule.probed(True, now)
        rule.opened(1, now + 1.0)
    assert rule.probed(True, 75.0)
    rule.opened(0, 76.0)
    rule.opened(0, 130.0)
    rule.opened(1, 136.0)
    assert [rule.probed(True, now) for now in (140.0, 200.0)] == [False, True]


def test_E15_without_return_to_first_or_a_second_host_the_first_host_is_never_probed() -> None:
    for rule in (returning(return_to_first=None), returning(hosts=1)):
        assert rule.period is None
        rule.opened(0, 0.0)
        rule.opened(1, 100.0)
    tries = reconnection(host=1)
    tries.move_to_first()
    assert (tries.host, tries.first_url) == (0, HOSTS[0])
