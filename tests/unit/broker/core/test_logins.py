from __future__ import annotations

import base64
import hashlib
import math
from typing import Any

import pytest
from pamqp import commands, encode

from qflow_client.broker import BrokerSettings
from qflow_client.broker.core.logins import FailedLogins, Login
from qflow_client.broker.core.passwords import hash_password, matches
from qflow_client.broker.core.session import PROTOCOL_HEADER, State

CLOSE = commands.Connection.Close
FAR = "192.0.2.7"


def start(world, address="", user="guest", password="guest"):
    client = world.stranger()
    client.session.address = address
    client.start(user=user, password=password)
    return client


def amqplain(world, response):
    client = world.stranger()
    client.feed(PROTOCOL_HEADER)
    client.only(commands.Connection.Start, 0)
    capabilities: Any = {"capabilities": {"authentication_failure_close": True}}
    client.send(0, commands.Connection.StartOk(capabilities, "AMQPLAIN", response, "en_US"))
    return client


def table(**fields):
    return encode.field_table(fields)[4:].decode("latin-1")


@pytest.mark.parametrize("password", ["guest", "wrong"])
def test_an_AMQPLAIN_login_succeeds_only_with_the_right_password(world, password):
    client = amqplain(world, table(LOGIN="guest", PASSWORD=password))
    if password == "guest":
        client.only(commands.Connection.Tune, 0)
        assert client.session.handshake.user == "guest"
    else:
        client.check_close(CLOSE, 403, "using AMQPLAIN")


@pytest.mark.parametrize(
    "response",
    ["", "x", table(LOGIN="guest"), table(PASSWORD="guest"), table(LOGIN=1, PASSWORD="guest"), "\0guest\0guest"],
    ids=["empty", "short", "no password", "no user", "a number", "PLAIN"],
)
def test_an_AMQPLAIN_login_without_a_user_or_a_password_is_a_syntax_error_as_on_rabbitmq(world, response):
    close = amqplain(world, response).only(CLOSE, 0)
    assert close.reply_code == 502
    assert "LOGIN and PASSWORD" in close.reply_text


def test_a_login_does_not_show_its_password_in_its_repr():
    assert "sesame" not in repr(Login("PLAIN", "ann", b"sesame"))


@pytest.mark.parametrize("address", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", ""])
def test_the_user_guest_can_log_in_from_the_machine_of_the_broker(world, address):
    start(world, address).only(commands.Connection.Tune, 0)


@pytest.mark.parametrize("address", [FAR, "2001:db8::1", "::ffff:192.0.2.7"])
def test_the_user_guest_cannot_log_in_from_another_machine_as_on_rabbitmq(make_world, address):
    close = start(make_world(), address).only(CLOSE, 0)
    assert close.reply_code == 403
    assert "can only connect via localhost (loopback_users)" in close.reply_text
    start(make_world(loopback_users=()), address).only(commands.Connection.Tune, 0)
    start(make_world(users={"ann": "sesame"}), address, "ann", "sesame").only(commands.Connection.Tune, 0)


def test_a_login_as_guest_from_another_machine_gets_the_same_answer_as_a_wrong_password(world):
    assert "localhost" not in start(world, FAR, password="wrong").only(CLOSE, 0).reply_text


def test_users_with_a_blank_password_are_rejected_in_the_settings():
    with pytest.raises(ValueError, match="password of user 'ann' is blank"):
        BrokerSettings(users={"ann": ""})


@pytest.mark.parametrize("value", ["guest", [1]])
def test_the_setting_loopback_users_accepts_only_names(value):
    with pytest.raises(TypeError, match="loopback_users must be names"):
        BrokerSettings(loopback_users=value)


def fail(world, times, address=FAR):
    for _ in range(times):
        assert start(world, address, "ann", "wrong").only(CLOSE, 0).reply_code == 403


def test_after_many_failed_logins_from_an_address_even_a_login_with_the_right_password_is_delayed(make_world):
    world = make_world(users={"ann": "right"}, max_failed_logins=3)
    fail(world, 4)
    right, wrong = start(world, FAR, "ann", "right"), start(world, FAR, "ann", "wrong")
    assert (right.received(), wrong.received()) == ([], [])
    assert right.session.deadlines.at == wrong.session.deadlines.at == 1.0
    right.tick(0.9)
    assert right.received() == []
    wrong.tick(1.0)
    assert wrong.only(CLOSE, 0).reply_code == 403
    right.session.tick(world.now)
    assert right.received() == []
    assert right.session.deadlines.at == 2.0
    right.tick(2.0)
    right.only(commands.Connection.Tune, 0)
    assert right.session.state is State.TUNE_OK


def authenticate(user, password):
    return {"ann": {"once": 10.0, "ever": math.inf}}.get(user, {}).get(password, 0)


def test_a_function_of_the_application_can_check_logins_and_failed_logins_are_counted(make_world):
    world = make_world(users={"ann": "right"}, authenticate=authenticate, max_failed_logins=1)
    start(world, FAR, "ann", "ever").only(commands.Connection.Tune, 0)
    assert start(world, FAR, "ann", "right").only(CLOSE, 0).reply_code == 403
    assert start(world, FAR, "bob", "ever").only(CLOSE, 0).reply_code == 403
    assert start(world, FAR, "ann", "ever").received() == []


def logged_in(world, password):
    client = start(world, user="ann", password=password)
    client.only(commands.Connection.Tune, 0)
    client.send(0, commands.Connection.TuneOk(0, 0, 0), commands.Connection.Open("/"))
    client.only(commands.Connection.OpenOk, 0)
    return client


def test_a_connection_is_closed_when_its_credentials_have_expired(make_world):
    world = make_world(authenticate=authenticate, heartbeat=0)
    client, other = logged_in(world, "once"), logged_in(world, "ever")
    client.tick(9.9)
    assert client.received() == []
    assert client.session.deadlines.at == 10.0
    client.tick(10.0)
    other.session.tick(world.now)
    assert other.received() == []
    close = client.only(CLOSE, 0)
    assert (close.reply_code, close.reply_text) == (
        320,
        "CONNECTION_FORCED - the credentials of user 'ann' have expired",
    )


def test_update_secret_with_a_right_secret_extends_the_connection_and_with_a_wrong_one_closes_it_with_530(make_world):
    world = make_world(authenticate=authenticate)
    client = logged_in(world, "once")
    world.now = 8.0
    client.call(0, commands.Connection.UpdateSecret("once", ""), commands.Connection.UpdateSecretOk)
    client.tick(10.0)
    assert client.received() == []
    assert client.session.deadlines.at == 18.0
    client.send(0, commands.Connection.UpdateSecret("wrong", ""))
    close = client.only(CLOSE, 0)
    assert (close.reply_code, close.reply_text) == (530, "NOT_ALLOWED - the new secret of user 'ann' was refused")


def test_failed_logins_from_one_address_do_not_delay_logins_from_another_address(make_world):
    world = make_world(users={"ann": "right"}, max_failed_logins=3)
    fail(world, 4)
    start(world, "192.0.2.8", "ann", "right").only(commands.Connection.Tune, 0)


def test_failed_logins_of_an_address_are_forgotten_over_time(make_world):
    world = make_world(users={"ann": "right"}, max_failed_logins=3)
    fail(world, 3)
    world.now = 3.0
    fail(world, 3)
    start(world, FAR, "ann", "right").only(commands.Connection.Tune, 0)


def test_a_client_whose_login_is_delayed_must_wait_and_then_has_the_usual_time_for_connection_open(make_world):
    world = make_world(users={"ann": "right"}, max_failed_logins=1, unauthenticated_timeout=0.5)
    fail(world, 2)
    slow, loud = start(world, FAR, "ann", "right"), start(world, FAR, "ann", "right")
    loud.send(0, commands.Connection.TuneOk(0, 0, 0))
    assert loud.only(CLOSE, 0).reply_code == 503
    slow.tick(slow.session.deadlines.at)
    assert (world.now, slow.session.state) == (0.5, State.ENDED)


def test_with_a_maximum_of_0_failed_logins_no_login_is_delayed(make_world):
    world = make_world(users={"ann": "right"}, max_failed_logins=0)
    fail(world, 100)
    start(world, FAR, "ann", "right").only(commands.Connection.Tune, 0)


def test_failed_logins_delay_an_address_for_at_most_5_seconds_and_use_bounded_memory():
    failed = FailedLogins(10)
    for _ in range(1000):
        failed.failed(FAR, 0.0)
    assert failed.delay(FAR, 0.0) == 5.0
    for number in range(10_000):
        failed.failed(f"10.0.{number >> 8}.{number & 255}", 0.0)
    assert len(failed._clear_at) == failed.MAX_ADDRESSES
    assert failed.delay(FAR, 0.0) == 0.0


def test_all_addresses_of_an_ipv6_64_network_count_as_one_address_for_failed_logins():
    failed = FailedLogins(1)
    for number in range(3):
        failed.failed(f"2001:db8::{number}:1", 0.0)
    assert failed.delay("2001:db8::ffff:ffff:ffff:ffff", 0.0) == 2.0
    assert failed.delay("2001:db8:0:1::1", 0.0) == 0.0
    failed.failed("::ffff:192.0.2.7", 0.0)
    failed.failed(FAR, 0.0)
    assert failed.delay(FAR, 0.0) == 1.0


# The test does not measure times, so a cheap hash is enough.
CHEAP = "$scrypt$ln=1,r=1,p=1$c2FsdHNhbHQ$"


def cheap(password: str) -> str:
    digest = hashlib.scrypt(password.encode(), salt=b"saltsalt", n=2, r=1, p=1, dklen=32)
    return CHEAP + base64.b64encode(digest).decode().rstrip("=")


def test_a_password_hash_matches_only_its_password_and_has_a_salt_of_its_own():
    hashes = [hash_password("sesame") for _ in range(2)]
    assert hashes[0] != hashes[1]
    assert "sesame" not in "".join(hashes)
    assert [matches(each, word) for each in hashes for word in (b"sesame", b"Sesame", b"")] == [True, False, False] * 2


@pytest.mark.parametrize(
    ("hashed", "words"),
    [
        ("$scrypt$", "must have the form"),
        ("$scrypt$ln=14,r=8,p=1$c2FsdHNhbHQ$short", "must have the form"),
        ("$scrypt$ln=24,r=8,p=1$c2FsdHNhbHQ$" + "A" * 43, "at most 256 MiB"),
        ("$scrypt$ln=14,r=8,p=9$c2FsdHNhbHQ$" + "A" * 43, "p must be at most 4"),
        ("$scrypt$ln=14,r=8,p=1$c2FsdHNhbHQ$" + "A" * 41, "must be base64"),
    ],
)
def test_an_unusable_password_hash_is_rejected_and_the_error_does_not_show_it(hashed, words):
    with pytest.raises(ValueError, match=words) as caught:
        BrokerSettings(users={"ann": hashed})
    assert "'ann'" in str(caught.value)
    assert hashed == "$scrypt$" or hashed not in str(caught.value)


@pytest.mark.parametrize(("user", "password"), [("ann", "sesame"), ("ann", "wrong"), ("bob", "sesame"), ("ann", "")])
def test_E8_a_user_that_is_set_with_a_password_hash_can_log_in_only_with_the_right_password(make_world, user, password):
    world = make_world(users={"ann": cheap("sesame")})
    client = start(world, user=user, password=password)
    if (user, password) == ("ann", "sesame"):
        client.only(commands.Connection.Tune, 0)
    else:
        assert client.only(CLOSE, 0).reply_code == 403


def test_E9_password_hashes_are_checked_outside_the_event_loop_and_each_right_password_only_once(make_world):
    world = make_world(users={"ann": cheap("sesame")})
    jobs = []
    world.host.logins.run = lambda function, done: jobs.append((function, done))
    waiting = start(world, FAR, "ann", "sesame")
    gone = start(world, FAR, "ann", "sesame")
    assert waiting.received() == []
    assert waiting.session.deadlines.at == waiting.session.deadlines.open_by
    gone.session.lost()
    for function, done in jobs:
        done(function())
    waiting.only(commands.Connection.Tune, 0)
    assert gone.received() == []
    # The right password is known now.
    start(world, FAR, "ann", "sesame").only(commands.Connection.Tune, 0)
    assert len(jobs) == 2
    # A wrong password is checked each time, and so is any password of an unknown user.
    for user, password in (("ann", "wrong"), ("bob", "sesame")):
        start(world, FAR, user, password)
    assert len(jobs) == 4


def test_E9_a_wrong_password_takes_as_long_for_a_user_without_a_hash_as_for_an_unknown_user(make_world):
    world = make_world(users={"ann": cheap("sesame"), "bob": "plain"})
    jobs = []
    world.host.logins.run = lambda function, done: jobs.append((function, done))
    start(world, FAR, "bob", "plain").only(commands.Connection.Tune, 0)
    assert jobs == []
    # The last one is the password of the hash that is checked instead.
    wrong = [start(world, FAR, "bob", password) for password in ("wrong", "", "sesame")]
    assert len(jobs) == 3
    for function, done in jobs:
        done(function())
    assert [client.only(CLOSE, 0).reply_code for client in wrong] == [403] * 3


def test_E9_an_address_has_at_most_as_many_concurrent_password_checks_as_allowed_failed_logins(make_world):
    world = make_world(users={"ann": cheap("sesame")}, max_failed_logins=3)
    jobs = []
    world.host.logins.run = lambda function, done: jobs.append((function, done))
    clients = [start(world, FAR, "ann", "sesame") for _ in range(10)]
    assert len(jobs) == 4
    for function, done in jobs:
        done(function())
    # The logins that waited need no further check.
    world.now += 20
    for client in clients[4:]:
        client.session.deadlines.at = 0
        client.session.deadlines.open_by = float("inf")
        client.session.tick(world.now)
    assert len(jobs) == 4
    for client in clients:
        client.only(commands.Connection.Tune, 0)
    assert world.host.failed_logins.delay(FAR, world.now) == 0
