"""The recorder of a queue's depth, with a running broker."""

from __future__ import annotations

import threading
import time

import pytest

from qflow_client.broker import Broker
from qflow_client.broker.core.errors import ChannelException
from qflow_client.testing.depth import DepthRecorder, DepthSample

STATES = [(0, 0, False), (1, 1, False), (2, 3, False), (3, 6, True)]


def state(sample: DepthSample) -> tuple[int, int, bool]:
    return sample.depth, sample.bytes, sample.on


def wait_until_seen(recorder: DepthRecorder, wanted: tuple[int, int, bool], times: int = 1) -> None:
    deadline = time.monotonic() + 30
    while [state(sample) for sample in recorder.samples[-times:]] != [wanted] * times:
        assert time.monotonic() < deadline, recorder.samples[-1]
        time.sleep(0.001)


def test_the_depth_recorder_samples_each_state_that_lasts_and_keeps_the_peaks():
    with Broker() as broker:
        broker.declare_queue("q", arguments={"qpid.flow_stop_count": 2, "qpid.flow_resume_count": 2})
        with DepthRecorder(broker, "q") as recorder:
            for body, seen in zip((b"1", b"22", b"333"), STATES[1:], strict=True):
                broker.publish(body, "q")
                wait_until_seen(recorder, seen)
            # The recorder also samples a queue that does not change.
            wait_until_seen(recorder, STATES[-1], times=3)
            broker.purge("q")
        assert list(dict.fromkeys(map(state, recorder.samples))) == STATES
        assert state(recorder.samples[-1]) == STATES[0]
        times = [sample.at for sample in recorder.samples]
        assert times == sorted(times)
        assert (recorder.peak_depth, recorder.peak_bytes) == (3, 6)
    assert not [thread for thread in threading.enumerate() if thread.name == "depth of q"]


def test_the_depth_recorder_raises_an_error_for_a_missing_queue():
    with Broker() as broker, pytest.raises(ChannelException, match="no queue 'q'"), DepthRecorder(broker, "q"):
        pytest.fail("it was recorded")
