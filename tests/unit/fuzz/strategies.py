"""Strategies for the fuzzing of the client and the broker: streams of bytes with random changes and cuts."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st

__all__ = ["cut", "mutated"]


@st.composite
def mutated(draw: st.DrawFn, streams: st.SearchStrategy[bytes]) -> bytes:
    """Draw a stream, and make up to four changes to it."""
    data = bytearray(draw(streams))
    for _ in range(draw(st.integers(0, 4))):
        if not data:
            break
        at = draw(st.integers(0, len(data) - 1))
        match draw(st.integers(0, 4)):
            case 0:
                data[at] ^= 1 << draw(st.integers(0, 7))
            case 1:
                data[at:at] = draw(st.binary(min_size=1, max_size=10))
            case 2:
                del data[at : at + draw(st.integers(1, 20))]
            case 3:
                data[at] = draw(st.sampled_from([0, 1, 0x7F, 0xCE, 0xFF]))
            case _:
                end = draw(st.integers(at, len(data)))
                data[at:at] = data[at:end]
    return bytes(data)


@st.composite
def cut(draw: st.DrawFn, streams: st.SearchStrategy[bytes]) -> list[bytes]:
    """Draw a stream, and cut it into pieces."""
    data = draw(streams)
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=12)))
    return [data[start:stop] for start, stop in itertools.pairwise([0, *cuts, len(data)])]
