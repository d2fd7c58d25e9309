"""The options of ``format("amqp")``, and the settings of each task. The tasks divide the job's limits equally (C6)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from qflow_client.errors import SettingsError
from qflow_client.redaction import shown
from qflow_client.settings import ProducerSettings, WhenFlowed

__all__ = ["BODY_FORMATS", "MESSAGE_IDS", "Option", "SinkOptions", "camel", "read"]

BODY_FORMATS = ("column", "json")
MESSAGE_IDS = ("column", "hash", "position", "producer")


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a job. `parse` converts a text to a value. `allowed` describes the texts that `parse` accepts."""

    parse: Callable[[str], Any]
    allowed: str


def one_of(*names: str) -> Option:

    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(text)
        return text

    return Option(parse, " or ".join(map(repr, names)))


def whole(what: str, most: int | None = None) -> Option:
    """Return an option that is a whole number from 1 to `most`. `what` names the counted things in errors."""

    def parse(text: str) -> int:
        number = int(text)
        if number < 1 or (most is not None and number > most):
            raise ValueError(text)
        return number

    return Option(parse, f"a whole number of {what}, {'at least 1' if most is None else f'from 1 to {most}'}")


def text_of(what: str, most: int = 4096) -> Option:
    """Return an option that is a text of 1 to `most` bytes. `what` describes the text in errors."""

    def parse(text: str) -> str:
        if not 0 < len(text.encode()) <= most:
            raise ValueError(text)
        return text

    return Option(parse, f"{what}, of at most {most} bytes")


# Spark's own options in lower case. Spark passes them with the options of this format, and `read` ignores them.
_SPARKS = frozenset({"checkpointlocation", "queryname"})

_PRODUCER = {field.name: field for field in fields(ProducerSettings) if field.metadata}


def camel(name: str) -> str:
    """Return a name in Spark's style, such as ``maxCapacity`` for ``max_capacity``."""
    return re.sub("_(.)", lambda match: match[1].upper(), name)


def read(given: Mapping[str, str], known: Mapping[str, Option]) -> dict[str, Any]:
    """Parse the given options, whose names are not case-sensitive.

    Raises:
        SettingsError: an option is unknown, or a value is not allowed.
    """
    names = {name.lower(): name for name in known}
    values = {}
    for key, text in given.items():
        name = names.get(key.lower())
        if name is None and key.lower() in _SPARKS:
            continue
        if name is None:
            raise SettingsError(f"there is no option {key!r}; the options are {', '.join(sorted(known))}")
        try:
            values[name] = known[name].parse(text)
        except ValueError:
            raise SettingsError(f"{name}={shown(text)}: it must be {known[name].allowed}") from None
    return values


def producer_options() -> dict[str, Option]:
    """Return an option for each setting of a producer. `ProducerSettings` checks the parsed values later."""
    return {
        camel(name): Option(field.metadata["parse"], field.metadata["allowed"]) for name, field in _PRODUCER.items()
    }


def broker_options() -> dict[str, Option]:
    """Return the connection options of a job that reads from a broker. `broker_of` uses their values."""
    return {name: option for name, option in producer_options().items() if name in ("url", "connectTimeout")}


def broker_of(values: Mapping[str, Any]) -> tuple[tuple[str, ...], float]:
    """Return the brokers' URLs and the connect timeout in seconds, from `values` or else from the environment."""
    timeout = {"connect_timeout": values["connectTimeout"]} if "connectTimeout" in values else {}
    settings = ProducerSettings.load(values.get("url"), **timeout)
    return settings.urls, settings.connect_timeout


_SINK = {
    "bodyFormat": one_of(*BODY_FORMATS),
    "capacityPerTask": whole("messages"),
    # A queue name has at most 255 bytes, and the names of two other queues are this name plus a suffix.
    "creditQueue": text_of("the name of a queue", 240),
    "jobId": text_of("a name for the job", 200),
    "maxConcurrentTasks": whole("tasks"),
    "messageId": one_of(*MESSAGE_IDS),
    "summaryPath": text_of("the path of a file on the driver"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkOptions:
    """The options of a job that writes.

    Attributes:
        producer: settings of each task's producer, with the limits of one task (C6). But with a credit queue, the
            capacity is that of the whole job.
        body_format: ``"column"`` or ``"json"``.
        message_id: source of the message ids, one of `MESSAGE_IDS`.
        job_id: name of the job, for message ids and the summary; ``None`` if the option is missing.
        summary_path: file to which summaries are appended; ``None`` for no file.
        credit_queue: queue from which tasks take parts of the job's capacity; ``None`` if each task has a fixed part.
    """

    producer: ProducerSettings
    body_format: str = "column"
    message_id: str = "column"
    job_id: str | None = None
    summary_path: str | None = None
    credit_queue: str | None = None

    @classmethod
    def load(cls, given: Mapping[str, str], slots: int | None) -> SinkOptions:
        """Read a job's options on the driver, because missing settings come from the driver's environment.

        Args:
            slots: number of tasks that run at the same time, by which limits are divided; ``None`` if it is unknown.
                The option ``maxConcurrentTasks`` has priority over this argument.

        Raises:
            SettingsError: an option is unknown, a value is not allowed, or a limit cannot be divided among the tasks.
        """
        values = read(given, producer_options() | _SINK)
        slots = values.get("maxConcurrentTasks", slots)
        settings = ProducerSettings.load(
            **{name: values[camel(name)] for name in _PRODUCER if camel(name) in values},
        )
        if settings.when_flowed is not WhenFlowed.BLOCK or settings.max_producer_flow_control_wait == 0:
            raise SettingsError(
                "a task that does not wait fails when its window is full: leave whenFlowed at 'block', and "
                "maxProducerFlowControlWait above 0"
            )
        if settings.outbox is not None:
            raise SettingsError(
                f"outbox={settings.outbox!r}: Spark runs a failed task again with all its rows, and several tasks "
                "cannot use one outbox; leave outbox out"
            )
        if not settings.confirms:
            raise SettingsError("confirms=False: a task ends when all its messages are confirmed; leave confirms on")
        per_task = values.get("capacityPerTask")
        if per_task is not None and "capacity" in values:
            raise SettingsError(
                f"capacity={settings.capacity} is for the whole job, and capacityPerTask={per_task} for each task: "
                "set only one"
            )
        credit_queue = values.get("creditQueue")
        if credit_queue is not None:
            if per_task is not None:
                raise SettingsError(
                    f"capacityPerTask={per_task} and creditQueue={credit_queue!r}: the credits that a task takes "
                    "from the queue are its capacity; leave capacityPerTask out"
                )
            if isinstance(settings.capacity, str):
                raise SettingsError(f"capacity={settings.capacity!r}: with creditQueue it must be a number")
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
    """Return the settings of one task. The job's limits are divided by `slots`. `per_task` replaces the capacity.

    All fields of the result are set explicitly, so that the environment of an executor cannot change them.
    """
    shares: dict[str, Any] = {} if per_task is None else {"capacity": per_task}
    window = "capacity_max" if per_task is None and settings.capacity == "auto" else "capacity"
    for name in (window, "capacity_bytes"):
        whole_job = getattr(settings, name)
        if whole_job is None or name in shares:
            continue
        slots = _known(slots, camel(name))
        if whole_job < slots:
            way_out = ", or set capacityPerTask" if name == window else ""
            raise SettingsError(
                f"{camel(name)}={whole_job}: it is for the whole job, and {slots} tasks run at once; it must be at "
                f"least {slots}{way_out}"
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
            f"{name} is for the whole job, and it is not known how many tasks run at once: set maxConcurrentTasks, or "
            "call qflow_client.spark.register(spark) first"
        )
    return slots
