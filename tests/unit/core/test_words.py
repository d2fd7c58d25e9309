"""The texts of receipts, errors, events and the package."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

import qflow_client
from qflow_client import (
    ConfirmTimeout,
    ConnectionFailed,
    DeliveryError,
    FlowControlTimeout,
    FlowEvent,
    FlowEventKind,
    FlowState,
    Message,
    MessageFailed,
    MessageNacked,
    MessageRejected,
    MessageReturned,
    NestedCall,
    Outcome,
    OutcomeUnknown,
    ProducerClosed,
    ProducerFlowed,
    QflowError,
    Receipt,
    SettingsError,
    UndeliveredMessages,
)
from qflow_client.amqp.frames import Route
from qflow_client.flow import Hold

HOLDS = (Hold("channel_flow", 1.0), Hold("paused", 2.0, "manager", "stock-taking"))


def receipt(outcome: Outcome | None = None, reply: tuple[int, str] | None = None, number: int = 1) -> Receipt:
    made = Receipt(b"body", Route(1, "ex", "key", True), "p-")
    made._number = number
    made._outcome = outcome
    made._reply = reply
    return made


@pytest.mark.parametrize(
    ("outcome", "error", "may_have_arrived"),
    [
        (None, None, True),
        (Outcome.CONFIRMED, None, True),
        (Outcome.SENT, None, True),
        (Outcome.NACKED, MessageNacked, True),
        (Outcome.RETURNED, MessageReturned, False),
        (Outcome.REJECTED, MessageRejected, False),
        (Outcome.FAILED, MessageFailed, False),
        (Outcome.UNKNOWN, OutcomeUnknown, True),
    ],
)
def test_each_failed_outcome_of_a_message_has_its_own_error_class(
    outcome: Outcome | None, error: type[DeliveryError] | None, may_have_arrived: bool
) -> None:
    made = receipt(outcome, (312, "NO_ROUTE") if outcome in (Outcome.RETURNED, Outcome.REJECTED) else None)
    assert made.done == (outcome is not None)
    assert made.may_have_arrived == may_have_arrived
    assert str(outcome or "unsettled") in repr(made)
    assert not made._seen, "none of these tells the application of a failure"
    for look in ("outcome", "delivered", "failure"):
        made._seen = False
        told = {
            "outcome": outcome,
            "delivered": outcome is not None and error is None,
            "failure": None if error is None else outcome,
        }
        assert getattr(made, look) == told[look]
        assert made._seen == (error is not None)
    made._seen = False
    raised = made.error()
    assert type(raised) is (error or type(None))
    assert made._seen == (error is not None), "whoever asked for a failure has been told"
    if isinstance(raised, (MessageReturned, MessageRejected)):
        assert (raised.reply_code, raised.reply_text) == (312, "NO_ROUTE")
    if isinstance(raised, DeliveryError):
        assert raised.receipt is made
        assert str(raised).startswith(made.describe())


def test_a_receipt_contains_its_message() -> None:
    made = receipt()
    assert (made.exchange, made.routing_key, made.size) == ("ex", "key", 4)
    assert made.message_id == "p-000000000001"
    assert made.message == Message(b"body", message_id="p-000000000001")
    assert repr(made) == "<Receipt message p-000000000001 to 'ex'/'key': unsettled>"
    own = Receipt(Message(b"abc", message_id="own", priority=3), Route(1, "", "k", False), "p-")
    assert (own.size, own.message_id, own.message.priority) == (3, "own", 3)
    assert receipt(Outcome.REJECTED, (404, "NOT_FOUND")).describe().endswith(": rejected (404 NOT_FOUND)")
    assert receipt(Outcome.UNKNOWN, (0, "reset by peer")).describe().endswith(": unknown (reset by peer)")


def test_A4_the_error_classes_for_messages_not_sent_and_for_admitted_messages_have_no_class_in_common() -> None:
    not_sent = (ProducerFlowed, FlowControlTimeout)
    admitted = (
        ConfirmTimeout,
        DeliveryError,
        MessageFailed,
        MessageNacked,
        MessageRejected,
        MessageReturned,
        OutcomeUnknown,
        UndeliveredMessages,
    )
    for kind in admitted:
        assert issubclass(kind, QflowError)
        assert not issubclass(kind, not_sent)
    for other in not_sent:
        assert not issubclass(other, admitted)
    assert issubclass(FlowControlTimeout, TimeoutError)
    assert issubclass(ConfirmTimeout, TimeoutError)
    assert not issubclass(ProducerFlowed, TimeoutError)
    assert issubclass(ConnectionFailed, ConnectionError)
    assert issubclass(SettingsError, ValueError)


def test_A4_an_error_for_a_send_that_waited_too_long_names_every_hold_with_its_duration() -> None:
    error = FlowControlTimeout(HOLDS, 0.5, b"message")
    assert str(error) == (
        "the message was not sent within 0.5 s, because the producer is blocked (flowed): channel_flow, paused "
        "(manager: stock-taking)"
    )
    assert (error.holds, error.waited, error.message) == (HOLDS, 0.5, b"message")
    assert (error.exchange, error.routing_key) == (None, None)
    routed = FlowControlTimeout(HOLDS, 0.5, b"message", exchange="ex", routing_key="key")
    assert (routed.exchange, routed.routing_key) == ("ex", "key")
    error_at_once = ProducerFlowed([], 0.0, b"message", "call send() to wait")
    assert str(error_at_once) == (
        "the message was not sent, because the producer is blocked (flowed): other sends wait first; "
        "call send() to wait"
    )


def test_errors_about_admitted_messages_contain_the_message_or_the_number_of_unsettled_messages() -> None:
    assert ProducerClosed("closed").message is None
    assert ProducerClosed("closed", b"m").message == b"m"
    assert ConfirmTimeout("late").unsettled == 1
    assert ConfirmTimeout("late", 7).unsettled == 7


def test_an_error_about_undelivered_messages_tells_which_can_be_resent_without_a_duplicate() -> None:
    receipts = [receipt(Outcome.NACKED), receipt(Outcome.UNKNOWN, number=2), receipt(Outcome.FAILED, number=3)]
    error = UndeliveredMessages(receipts)
    assert error.receipts == tuple(receipts)
    assert [message.message_id for message in error.unsent] == ["p-000000000003"]
    assert [message.message_id for message in error.unknown] == ["p-000000000001", "p-000000000002"]
    assert {(message.exchange, message.routing_key) for message in (*error.unsent, *error.unknown)} == {("ex", "key")}
    assert not any(each._seen for each in receipts)
    assert str(error) == (
        "3 admitted messages were not delivered: 1 safe to send again (.unsent), 2 that may have arrived (.unknown); "
        "the first: message p-000000000001 to 'ex'/'key': nacked"
    )
    assert error.dropped == 0
    dropped = UndeliveredMessages(receipts, dropped=7)
    assert dropped.dropped == 7
    assert str(dropped).startswith(
        "10 admitted messages were not delivered: 1 safe to send again (.unsent), 2 that may have arrived (.unknown), "
        "7 without receipts, because max_failed_bytes was reached or the outbox was deleted (.dropped); the first: "
    )
    assert str(UndeliveredMessages(receipts, "in other words")) == "in other words"
    assert str(UndeliveredMessages([])).startswith("0 admitted messages")


def test_flow_events_and_flow_states_have_a_readable_text() -> None:
    event = FlowEvent(FlowEventKind.FLOWED, "orders", HOLDS[1], HOLDS, 10.0, 10.0, 0.0)
    assert str(event) == "orders: flowed: paused (manager: stock-taking)"
    assert event.flowed
    waiting = FlowEvent(FlowEventKind.WAITING, "orders", None, (), 15.0, 10.0, 5.0)
    assert str(waiting) == "orders: waiting after 5 s"
    assert not waiting.flowed
    assert FlowState(HOLDS, 1.0, 1, {}).flowed
    assert not FlowState((), None, 1, {}).flowed


def test_importing_the_package_does_not_import_optional_libraries() -> None:
    program = (
        "import sys, qflow_client; "
        "heavy = {'pika', 'aio_pika', 'aiormq', 'pyspark', 'typer', 'rich', 'opentelemetry', 'sqlite3', "
        "'qflow_client.cli', 'qflow_client.spark', 'qflow_client.broker', 'qflow_client.testing'}; "
        "print(sorted(heavy & set(sys.modules))); "
        "qflow_client.Producer; print(sorted(heavy & set(sys.modules))); "
        "qflow_client.AsyncProducer; print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == [
        "[]",
        "['pika']",
        "['aio_pika', 'aiormq', 'pika']",
    ]


def test_the_package_exports_the_types_that_its_producers_return() -> None:
    from qflow_client.sync import Producer, SyncReceipt

    assert (qflow_client.Producer, qflow_client.SyncReceipt) == (Producer, SyncReceipt)
    assert {"Producer", "SyncReceipt"} <= set(qflow_client.__all__)
    assert issubclass(SyncReceipt, Receipt)


def test_the_package_exports_exactly_the_names_in_the_documentation() -> None:
    for name in qflow_client.__all__:
        assert getattr(qflow_client, name) is not None
    assert list(qflow_client.__all__) == sorted(qflow_client.__all__)
    with pytest.raises(AttributeError, match="module 'qflow_client' has no attribute 'Consumer'"):
        _ = qflow_client.Consumer


def test_D5_the_package_has_one_flow_manager_for_the_process() -> None:
    assert isinstance(qflow_client.flow_manager, qflow_client.FlowManager)
    assert not qflow_client.flow_manager.is_stopped


@pytest.mark.parametrize(
    ("exchange", "key", "code", "words"),
    [
        ("", "key", 312, "; there is no queue 'key': declare it, or set mandatory=False"),
        ("", "", 312, "; routing_key is empty: set it to the name of a queue, or set mandatory=False"),
        ("ex", "key", 312, "; no queue is bound to exchange 'ex' for it: bind one, or set mandatory=False"),
        ("ex", "key", 313, ""),
    ],
)
def test_the_error_of_a_message_returned_for_lack_of_a_queue_says_how_to_get_one(
    exchange: str, key: str, code: int, words: str
) -> None:
    made = Receipt(b"body", Route(1, exchange, key, True), "p-")
    made._number = 1
    made._outcome = Outcome.RETURNED
    made._reply = (code, "WHY")
    text = str(made.error())
    assert text.startswith(made.describe() + words)
    assert (text == made.describe()) == (not words)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
@pytest.mark.parametrize(
    "error",
    [
        ConfirmTimeout("3 messages are not settled", 3),
        ConnectionFailed("amqp://h: no answer"),
        FlowControlTimeout(HOLDS, 1.5, b"body", "advice", exchange="ex", routing_key="key"),
        MessageReturned("returned", receipt(Outcome.RETURNED, (312, "NO_ROUTE")), 312, "NO_ROUTE"),
        NestedCall("flush()"),
        ProducerClosed("closed", b"body", exchange="ex", routing_key="key"),
        UndeliveredMessages([receipt(Outcome.FAILED, (0, "lost"))], stored=2),
    ],
    ids=lambda error: type(error).__name__,
)
def test_each_error_of_the_package_can_be_pickled_from_one_process_to_another(
    error: QflowError, copied: Callable[[QflowError], QflowError]
) -> None:
    error.add_note("a note")
    found = copied(error)
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert {name: repr(value) for name, value in vars(found).items()} == {
        name: repr(value) for name, value in vars(error).items()
    }


def test_a_copy_of_a_receipt_does_not_contain_the_callers_that_wait_for_it() -> None:
    made = receipt(Outcome.FAILED, (0, "lost"))
    made._waiter = threading.Lock()
    for found in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert found._waiter is None
        assert repr(found) == repr(made)


def test_the_outcome_of_a_copied_unsettled_receipt_is_unknown_because_only_the_original_gets_the_answer() -> None:
    made = receipt()
    for found in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert isinstance(found.error(), OutcomeUnknown)
        assert found.describe().endswith("unknown (only the original of this copied receipt gets the broker's answer)")
    assert made.outcome is None
