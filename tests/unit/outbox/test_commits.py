from __future__ import annotations

from qflow_client.outbox.commits import CommitWaits


def test_a_wait_for_a_commit_that_ends_at_its_time_limit_is_not_kept_until_the_next_commit() -> None:
    waits = CommitWaits()
    late, first, second = (waits.begin(sequence) for sequence in (3, 1, 2))
    assert waits.end(late, 0.001) == "the message is not on disk after 0.001 s"
    assert list(waits._waits) == [first, second]
    waits.committed(1, None)
    assert waits.end(first, 0.001) == ""
    waits.committed(1, OSError("disk full"))
    assert waits.end(second, 0.001) == "disk full"
    assert not waits._waits
