"""The functions of `benchmarks.shares` without measurements. Measured values are not tested."""

from __future__ import annotations

from benchmarks.shares import KERNEL, Shares, count_samples

RAW = """\
main (benchmarks/dropin.py:1);publish (aio_pika/exchange.py:2);publish (qflow_client/aio_pika/flow.py:3) 5
main (benchmarks/dropin.py:1);publish (aio_pika/exchange.py:2);debug (logging/__init__.py:3) 2
main (benchmarks/dropin.py:1);run (asyncio/runners.py:2);select (selectors.py:3) 1
main (benchmarks/dropin.py:1);_find (<frozen importlib._bootstrap>:2);<module> (pika/spec.py:3) 90
_bootstrap (threading.py:1);run (/venv/lib/python3.11/site-packages/pika/x.py:2) 4
_bootstrap (threading.py:1) 7
"""


def test_a_cpu_sample_counts_for_the_innermost_package_on_the_stack() -> None:
    assert count_samples(RAW.splitlines()) == {"qflow_client": 5, "aio_pika": 2, "asyncio": 1, "pika": 4}


def test_the_shares_of_packages_are_in_microseconds_per_message_and_in_percent_beginning_with_the_largest() -> None:
    shares = Shares("a loop", 1_000_000, {"pika": 1.0, KERNEL: 3.0}, 7)
    assert shares.rows() == [(KERNEL, 3.0, 75.0), ("pika", 1.0, 25.0)]
