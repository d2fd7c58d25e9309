"""Computes percentiles of whole numbers in constant memory.

Each number below 64 has its own bucket, so a percentile below 64 is exact. Any other percentile is too high by at most
1/32, because the numbers of a bucket differ by less than 1/32. To merge histograms, add their counts.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["BITS", "bucket_of", "percentile", "top_of"]

#: Numbers with the same number of bits are in the same bucket if their first `BITS` bits are equal.
BITS = 6


def bucket_of(value: int) -> int:
    """Return the bucket of a number. Negative numbers are in the bucket of 0."""
    if value < 1 << BITS:
        return max(0, value)
    shift = value.bit_length() - BITS
    return (shift << (BITS - 1)) + (value >> shift)


def top_of(bucket: int) -> int:
    """Return the largest number of a bucket."""
    if bucket < 1 << BITS:
        return bucket
    shift = (bucket >> (BITS - 1)) - 1
    return (((bucket & ((1 << (BITS - 1)) - 1)) + (1 << (BITS - 1)) + 1) << shift) - 1


def percentile(buckets: Mapping[int, int], percent: int, largest: int) -> int:
    """Return a number that at least `percent` percent of the counted numbers do not exceed.

    Args:
        buckets: count of numbers for each bucket. If there are no buckets, the result is 0.
        largest: the largest of all counted numbers.
    """
    left = -(-sum(buckets.values()) * percent // 100)
    for bucket in sorted(buckets):
        left -= buckets[bucket]
        if left <= 0:
            return min(top_of(bucket), largest)
    return 0
