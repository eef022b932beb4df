"""Host time of launches: who is timed, and that nothing else is."""

from __future__ import annotations

import pytest
from attn_graph.profilers.clock import FakeClock
from attn_graph.profilers.launch_cost import timed

DRAIN_NS, FIRST_NS = 1_000_000, 9_000


class MadeUpHost:
    """Calls take what they say, and FIRST_NS more when the host was away since the last one."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.order: list[str] = []
        self.away = True

    def call(self, name: str, ns: int):
        def call() -> None:
            self.order.append(name)
            self.clock.advance(ns + FIRST_NS * self.away)
            self.away = False

        return call

    def drain(self) -> None:
        self.order.append("drain")
        self.clock.advance(DRAIN_NS)
        self.away = True


def run(drop_first: bool) -> tuple[dict, list[str]]:
    host = MadeUpHost()
    arms = {("a", 0): host.call("a", 2_000), ("b", 1): host.call("b", 500)}
    taken = timed(arms, host.drain, bursts=2, calls=3, drop_first=drop_first, clock=host.clock)
    return taken, host.order


def test_a_tight_loop_holds_neither_the_drain_nor_the_first_call_behind_it():
    taken, _ = run(drop_first=True)
    assert taken == {("a", 0): pytest.approx([2.0] * 6), ("b", 1): pytest.approx([0.5] * 6)}


def test_a_cold_call_is_the_first_behind_a_drain():
    taken, _ = run(drop_first=False)
    assert taken["a", 0] == pytest.approx([11.0, 2.0, 2.0] * 2)


def test_arms_take_turns_burst_by_burst():
    _, order = run(drop_first=False)
    warm = ["a"] * 3 + ["b"] * 3
    assert order == [*warm, *["drain", *"aaa", "drain", *"bbb"] * 2, "drain"]
