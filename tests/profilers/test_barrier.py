from __future__ import annotations

import itertools
import multiprocessing
import threading
import time

import pytest
from attn_graph.profilers import barrier
from attn_graph.profilers.barrier import (
    BarrierAborted,
    BarrierMismatch,
    BarrierTimeout,
    DeadlineBarrier,
    barrier_memory,
)
from attn_graph.profilers.clock import FakeClock, monotonic_ns

SPAWN = multiprocessing.get_context("spawn")


def team(size: int, **options) -> tuple[list[DeadlineBarrier], object]:
    memory = barrier_memory(size, SPAWN)
    return [DeadlineBarrier(memory, rank, size, **options) for rank in range(size)], memory


def in_threads(*calls) -> list[object]:
    """What each call returned or raised, run side by side."""
    found: list[object] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            found[index] = calls[index]()
        except Exception as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


def test_all_ranks_get_the_deadline_that_the_leader_published():
    ranks, _ = team(3, spin=False)
    for step in range(50):
        before = monotonic_ns()
        deadlines = in_threads(*(lambda rank=rank, step=step: rank.wait(step) for rank in ranks))
        assert len(set(deadlines)) == 1 and deadlines[0] >= before + 40_000
        assert monotonic_ns() >= deadlines[0]


def test_a_wait_ends_at_the_deadline_and_not_before():
    clock = FakeClock(tick_ns=7)
    alone = DeadlineBarrier(barrier_memory(1, SPAWN), 0, 1, lead_us=5.0, clock=clock)
    for _ in range(3):
        deadline = alone.wait()
        # One tick of this clock passes per reading, so the reading that ended the wait is the last one.
        assert deadline <= clock.now_ns - 7 < deadline + 7


def test_the_lead_is_free_for_other_work():
    clock = FakeClock(tick_ns=1)
    alone = DeadlineBarrier(barrier_memory(1, SPAWN), 0, 1, lead_us=5.0, clock=clock)
    called = []
    deadline = alone.wait(in_lead=lambda: called.append(clock.now_ns))
    assert len(called) == 1 and called[0] < deadline


def test_a_timeout_names_exactly_the_missing_ranks():
    ranks, _ = team(4, timeout_s=0.5)
    leader, second, _, _ = in_threads(ranks[0].wait, ranks[2].wait, lambda: None, lambda: None)
    assert isinstance(leader, BarrierTimeout) and isinstance(second, BarrierTimeout)
    assert leader.missing == second.missing == [1, 3]
    assert "rank 1, 3 did not reach the barrier within 0.5 s" in str(leader)


def test_a_leader_that_stops_before_publishing_is_the_missing_rank():
    (_, follower), memory = team(2, timeout_s=1.0, clock=FakeClock(tick_ns=1_000_000))
    barrier._arrival_words(memory, 2)[0] = 1 << 32  # arrived, then never heard of again
    with pytest.raises(BarrierTimeout) as raised:
        follower.wait()
    assert raised.value.missing == [0]


def test_an_abort_ends_present_and_later_waits_at_once():
    ranks, memory = team(3, timeout_s=60)

    def abort_soon() -> None:
        time.sleep(0.1)
        barrier.abort(memory)

    start = time.monotonic()
    first, second, _ = in_threads(ranks[0].wait, ranks[1].wait, abort_soon)
    assert isinstance(first, BarrierAborted) and isinstance(second, BarrierAborted)
    with pytest.raises(BarrierAborted):
        ranks[2].wait()
    assert time.monotonic() - start < 5


def test_ranks_at_different_steps_are_told_apart_from_ranks_at_the_same():
    ranks, _ = team(3, timeout_s=10)
    assert len(set(in_threads(*(lambda rank=rank: rank.wait(4) for rank in ranks)))) == 1
    leader, other, odd = in_threads(lambda: ranks[0].wait(5), lambda: ranks[1].wait(5), lambda: ranks[2].wait(6))
    assert isinstance(leader, BarrierMismatch) and leader.odd == [2]
    assert "rank 2 at 6, the others at 5" in str(leader)
    assert isinstance(other, BarrierAborted) and isinstance(odd, BarrierAborted)


def test_arrivals_count_waits_and_survive_full_width_steps():
    ranks, memory = team(2, spin=False)
    for _ in range(3):
        in_threads(*(lambda rank=rank: rank.wait(0xFFFF_FFFF) for rank in ranks))
    assert barrier.arrivals(memory) == [3, 3]


def test_no_two_ranks_write_to_one_cache_line():
    _, memory = team(5)
    before = bytes(memory)
    written = []
    for rank in range(5):
        barrier._arrival_words(memory, 5)[rank] = -1
        after = bytes(memory)
        written.append(next(i for i, (old, new) in enumerate(zip(before, after, strict=True)) if old != new))
        before = after
    assert min(later - earlier for earlier, later in itertools.pairwise(written)) >= 128


@pytest.mark.parametrize(("rank", "lead_us"), [(2, 40.0), (-1, 40.0), (0, 0.0)])
def test_arguments_that_cannot_work_are_refused(rank: int, lead_us: float):
    with pytest.raises(ValueError, match="must be"):
        DeadlineBarrier(barrier_memory(2, SPAWN), rank, 2, lead_us=lead_us)
