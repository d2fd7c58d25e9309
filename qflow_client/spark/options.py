"""The options of ``format("amqp")``: what there is, what is allowed, and how a job's budget becomes a task's."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from qflow_client.errors import SettingsError
from qflow_client.redaction import shown
from qflow_client.settings import ProducerSettings, WhenFlowed

__all__ = ["BODY_FORMATS", "MESSAGE_IDS", "Option", "SinkOptions", "camel", "read"]

#: What ``bodyFormat`` may be.
BODY_FORMATS = ("column", "json")
#: What ``messageId`` may be.
MESSAGE_IDS = ("column", "hash", "position", "producer")


@dataclass(frozen=True, slots=True)
class Option:
    """One option that is no setting of a producer.

    Attributes:
        parse: makes the value of the text; raises ``ValueError`` for what is not allowed.
        allowed: what is, in words.
    """

    parse: Callable[[str], Any]
    allowed: str


def one_of(*names: str) -> Option:
    """An option that is one of some words."""

    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(text)
        return text

    return Option(parse, " or ".join(map(repr, names)))


def whole(what: str, most: int | None = None) -> Option:
    """An option that is a number from 1 on."""

    def parse(text: str) -> int:
        number = int(text)
        if number < 1 or (most is not None and number > most):
            raise ValueError(text)
        return number

    return Option(parse, f"a whole number of {what}, {'at least 1' if most is None else f'from 1 to {most}'}")


def text_of(what: str, most: int = 4096) -> Option:
    """An option that is some text."""

    def parse(text: str) -> str:
        if not 0 < len(text.encode()) <= most:
            raise ValueError(text)
        return text

    return Option(parse, f"{what}, of at most {most} bytes")


# What Spark itself is told by options of the same place.
_SPARKS = frozenset({"checkpointlocation", "queryname"})

_PRODUCER = {field.name: field for field in fields(ProducerSettings) if field.metadata}


def camel(name: str) -> str:
    """A name as Spark writes it: ``max_producer_flow_control_wait`` is ``maxProducerFlowControlWait``."""
    return re.sub("_(.)", lambda match: match[1].upper(), name)


def read(given: Mapping[str, str], known: Mapping[str, Option]) -> dict[str, Any]:
    """Parse the options that are given.

    Args:
        given: as Spark has them: text by name, and the case of names does not matter.
        known: what there is, by name.

    Raises:
        SettingsError: an option that does not exist, or a value that is not allowed.
    """
    names = {name.lower(): name for name in known}
    values = {}
    for key, text in given.items():
        name = names.get(key.lower())
        if name is None and key.lower() in _SPARKS:
            continue
        if name is None:
            raise SettingsError(f"there is no option {key!r}; there are {', '.join(sorted(known))}")
        try:
            values[name] = known[name].parse(text)
        except ValueError:
            raise SettingsError(f"{name}={shown(text)}: it must be {known[name].allowed}") from None
    return values


def producer_options() -> dict[str, Option]:
    """Every setting of a producer as an option; what is allowed is checked by `ProducerSettings` itself."""
    return {
        camel(name): Option(field.metadata["parse"], field.metadata["allowed"]) for name, field in _PRODUCER.items()
    }


def broker_options() -> dict[str, Option]:
    """The options of who only reads that say which broker, for `broker_of`."""
    return {name: option for name, option in producer_options().items() if name in ("url", "connectTimeout")}


def broker_of(values: Mapping[str, Any]) -> tuple[tuple[str, ...], float]:
    """The brokers to try, and the seconds that each may take; what was not given comes from the environment."""
    timeout = {"connect_timeout": values["connectTimeout"]} if "connectTimeout" in values else {}
    settings = ProducerSettings.load(values.get("url"), **timeout)
    return settings.urls, settings.connect_timeout


_SINK = {
    "bodyFormat": one_of(*BODY_FORMATS),
    "capacityPerTask": whole("messages"),
    # Names of queues have 255 bytes at the most, and others are named after it.
    "creditQueue": text_of("the name of a queue", 240),
    "jobId": text_of("a name for the job", 200),
    "maxConcurrentTasks": whole("tasks"),
    "messageId": one_of(*MESSAGE_IDS),
    "summaryPath": text_of("the path of a file on the driver"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkOptions:
    """What a job that writes was told.

    Attributes:
        producer: the settings of each task's producer: the job's, with the limits of the job divided (C6).
        body_format: ``"column"`` or ``"json"``.
        message_id: one of `MESSAGE_IDS`.
        job_id: names the job in message ids by position, and in the summary; ``None`` if none was given.
        summary_path: the file that summaries are appended to; ``None`` for none.
        credit_queue: the queue whose credits are the job's capacity, which is not divided then; ``None`` for none.
    """

    producer: ProducerSettings
    body_format: str = "column"
    message_id: str = "column"
    job_id: str | None = None
    summary_path: str | None = None
    credit_queue: str | None = None

    @classmethod
    def load(cls, given: Mapping[str, str], slots: int | None) -> SinkOptions:
        """Read a job's options, on the driver.

        Args:
            given: as Spark has them.
            slots: tasks that run at once, unless an option says so; ``None`` if it is not known.

        Raises:
            SettingsError: an option that does not exist, a value that is not allowed, or a budget that is too small.
        """
        values = read(given, producer_options() | _SINK)
        slots = values.get("maxConcurrentTasks", slots)
        settings = ProducerSettings.load(
            **{name: values[camel(name)] for name in _PRODUCER if camel(name) in values},
        )
        if settings.when_flowed is not WhenFlowed.BLOCK or settings.max_producer_flow_control_wait == 0:
            raise SettingsError(
                "a task that does not wait fails at its first full window: leave whenFlowed at 'block', and "
                "maxProducerFlowControlWait above 0"
            )
        if settings.outbox is not None:
            raise SettingsError(
                f"outbox={settings.outbox!r}: a task that dies is run again, with all that it had to send, and several "
                "tasks cannot use one outbox; leave outbox out"
            )
        if not settings.confirms:
            raise SettingsError("confirms=False: a task ends when all it sent is confirmed; leave confirms on")
        per_task = values.get("capacityPerTask")
        if per_task is not None and "capacity" in values:
            raise SettingsError(
                f"capacity={settings.capacity} is the whole job's and capacityPerTask={per_task} each task's: set one"
            )
        credit_queue = values.get("creditQueue")
        if credit_queue is not None:
            if per_task is not None:
                raise SettingsError(
                    f"capacityPerTask={per_task} and creditQueue={credit_queue!r}: a task has what credits it takes "
                    "from the queue; leave capacityPerTask out"
                )
            if isinstance(settings.capacity, str):
                raise SettingsError(f"capacity={settings.capacity!r}: of creditQueue it must be a number")
            per_task = settings.capacity
        return cls(
            producer=_share(settings, per_task, slots),
            body_format=values.get("bodyFormat", "column"),
            message_id=values.get("messageId", "column"),
            job_id=values.get("jobId"),
            summary_path=values.get("summaryPath"),
            credit_queue=credit_queue,
        )


def _share(settings: ProducerSettings, per_task: int | None, slots: int | None) -> ProducerSettings:
    """The settings of one task: its part of the job's capacity, bytes and rate.

    All of them are given explicitly, so that the environment of an executor changes nothing.
    """
    shares: dict[str, Any] = {} if per_task is None else {"capacity": per_task}
    for name in ("capacity", "capacity_bytes"):
        whole_job = getattr(settings, name)
        if whole_job is None or name in shares:
            continue
        slots = _known(slots, camel(name))
        if whole_job < slots:
            way_out = ", or set capacityPerTask" if name == "capacity" else ""
            raise SettingsError(
                f"{camel(name)}={whole_job}: it is the whole job's, and {slots} tasks run at once; it must be at least "
                f"{slots}{way_out}"
            )
        shares[name] = whole_job // slots
    if settings.rate is not None:
        slots = _known(slots, "rate")
        shares |= {"rate": settings.rate / slots, "rate_burst": max(1, settings.burst // slots)}
    everything = {name: getattr(settings, name) for name in _PRODUCER}
    return ProducerSettings(**(everything | shares))


def _known(slots: int | None, name: str) -> int:
    if slots is None:
        raise SettingsError(
            f"{name} is the whole job's, and how many tasks run at once could not be found out: set "
            "maxConcurrentTasks, or call qflow_client.spark.register(spark) first"
        )
    return slots


def named(settings: ProducerSettings, name: str) -> ProducerSettings:
    """The settings of a producer that bears a name of its own unless one was set."""
    return settings.replace(name=f"{settings.name} {name}"[:255])
