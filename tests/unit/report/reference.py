"""A simple implementation of the report's tables, which keeps all lines in lists and pairs holds line by line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

S = 1_000_000


def shown(value: int, largest: int) -> int:
    """Return a percentile as the report shows it: rounded up to six leading bits, but not above the largest value."""
    digits = max(0, len(f"{value:b}") - 6)
    return int(min(value | (2**digits - 1), largest))


def percentiles(values: list[int], name: str, scale: int = S) -> dict[str, float]:
    ordered = sorted(values)
    found = {}
    for percent in (50, 90, 99):
        rank = -(-len(ordered) * percent // 100)
        found[f"{name}_p{percent}"] = shown(ordered[rank - 1], ordered[-1]) / scale if ordered else 0.0
    return found | {f"{name}_max": (ordered[-1] if ordered else 0) / scale}


def rate(messages: int, us: int) -> float | None:
    return messages * S / us if us > 0 else None


def reference(lines: Iterable[Mapping[str, Any]], width: int) -> dict[str, list[dict[str, Any]]]:
    lines = list(lines)
    by_kind = defaultdict(list)
    for line in lines:
        by_kind[line["kind"]].append(line)

    def key(line: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(line[name] for name in ("origin", "producer", "connection", "queue", "reason"))

    # A hold is a raise and the next lift of the same source. The time of the raise in the lift's line is not used.
    lasted: dict[Any, list[int]] = defaultdict(list)
    raised: dict[Any, int] = defaultdict(int)
    opened: dict[Any, int] = {}
    last_told: dict[Any, int] = {}
    held_us: dict[Any, int] = defaultdict(int)
    series: dict[Any, int] = defaultdict(int)
    waits: dict[Any, int] = defaultdict(int)
    flowed_since: dict[str, tuple[int, str]] = {}
    open_of: dict[str, int] = defaultdict(int)
    episodes = defaultdict(list)
    for line in lines:
        if line["kind"] not in ("raised", "held", "lifted"):
            continue
        one: Any = (key(line), line.get("source", "")) if line["origin"] == "broker" else (key(line), line["since"])
        who = line["producer"]
        if line["kind"] == "raised":
            raised[key(line)] += 1
            opened[one] = last_told[one] = line["at"]
            if line["origin"] == "producer":
                if not open_of[who]:
                    flowed_since[who] = (line["at"], line["reason"])
                open_of[who] += 1
            continue
        us = line["at"] - last_told[one]
        last_told[one] = line["at"]
        held_us[key(line)] += us
        series[line["origin"], line["queue"], line["reason"], line["at"] // width * width] += us
        causes = line.get("causes", {})
        assert sum(causes.values()) == us or not causes
        for filled, share in causes.items():
            waits[line["queue"], line["reason"], who, filled] += share
        if line["kind"] == "lifted":
            lasted[key(line)].append(line["at"] - opened.pop(one))
            if line["origin"] == "producer":
                open_of[who] -= 1
                if not open_of[who]:
                    since, _ = flowed_since.pop(who)
                    episodes[who].append(line["at"] - since)

    free: dict[Any, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for line in by_kind["raised"]:
        if "free_us" in line:
            for one, at in ((key(line), 0), ((*key(line)[:4], line["after"]), 2)):
                free[one][at] += line["free_us"]
                free[one][at + 1] += line["free_messages"]
    notices: dict[Any, int] = defaultdict(int)
    for line in by_kind["waiting"]:
        notices[key(line)] += 1

    span = (max(line["at"] for line in lines) - min(line["at"] for line in lines)) / S
    keys = {*raised, *free, *notices}
    tables: dict[str, list[dict[str, Any]]] = {
        "holds": [
            {
                **dict(zip(("origin", "producer", "connection", "queue", "reason"), each, strict=True)),
                "episodes": max(raised[each], len(lasted[each])),
                "unfinished": raised[each] - len(lasted[each]),
                "seconds": held_us[each] / S,
                **percentiles(lasted[each], "seconds"),
                "notices": notices[each],
                "rate_before": rate(free[each][1], free[each][0]),
                "rate_after": rate(free[each][3], free[each][2]),
            }
            for each in sorted(keys)
        ],
        "producers": [
            {
                "producer": who,
                "times_flowed": len(each),
                "seconds_flowed": sum(each) / S,
                "part_flowed": sum(each) / S / span,
                **percentiles(each, "seconds"),
            }
            for who, each in sorted(episodes.items())
        ],
        "waits": [
            {"queue": queue, "reason": reason, "waited": waited, "filled": filled, "seconds": us / S}
            for (queue, reason, waited, filled), us in sorted(waits.items())
        ],
        "held_over_time": [
            {"at": at / S, "origin": origin, "queue": queue, "reason": reason, "seconds": us / S}
            for (origin, queue, reason, at), us in sorted(series.items())
        ],
        "queues": [],
        "publishers": [],
        "depth_over_time": [],
    }
    for queue in sorted({line["queue"] for line in by_kind["depth"]}):
        samples = [line for line in by_kind["depth"] if line["queue"] == queue]
        offs = [line for line in by_kind["off"] if line["queue"] == queue]
        us = sum(line["us"] for line in samples)
        busy = [line for line in samples if line["depth"] and line["depth"] - line["arrived"] + line["left"]]
        latest = max(samples, key=lambda line: line["at"])
        left = sum(line["left"] for line in samples)
        # If every sample starts or ends with an empty queue, use the messages that left in all samples.
        drained = busy if sum(line["us"] for line in busy) else samples
        tables["queues"].append(
            {
                "queue": queue,
                "samples": len(samples),
                "seconds": us / S,
                "messages": sum(line["arrived"] for line in samples),
                "bytes": sum(line["arrived_bytes"] for line in samples),
                "left": left,
                "arrival_rate": rate(sum(line["arrived"] for line in samples), us),
                "drain_rate": rate(sum(line["left"] for line in drained), sum(line["us"] for line in drained)) or 0.0,
                "depth_mean": sum(line["depth"] * line["us"] for line in samples) / us,
                "depth_max": max(line["peak"] for line in samples),
                "bytes_max": max(line["peak_bytes"] for line in samples),
                **{name: latest[name] for name in ("stop", "resume", "stop_bytes", "resume_bytes")},
                "times_on": len(offs),
                "seconds_on": sum(line["at"] - line["since"] for line in offs) / S,
                **percentiles([line["at"] - line["since"] for line in offs], "on_seconds"),
                **percentiles([line["overshoot"] for line in offs], "overshoot", 1),
                "overshoot_bytes_max": 0,
            }
        )
        names = sorted({name for line in samples for name in line["arrivals"]})
        for name in names:
            count = sum(line["arrivals"].get(name, 0) for line in samples)
            tables["publishers"].append({"queue": queue, "producer": name, "messages": count})
        for at in sorted({line["at"] // width * width for line in samples}):
            within = [line for line in samples if line["at"] // width * width == at]
            tables["depth_over_time"].append(
                {
                    "at": at / S,
                    "queue": queue,
                    "depth_max": max(line["peak"] for line in within),
                    "arrival_rate": sum(line["arrived"] for line in within) * S / width,
                    "leave_rate": sum(line["left"] for line in within) * S / width,
                    "seconds_held": series["broker", queue, "channel_flow", at] / S,
                }
            )
    return tables
