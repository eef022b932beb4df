"""The clock is an argument: measuring code takes a `Clock`, tests hand it a `FakeClock`."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], int]
"""Returns nanoseconds since a fixed but unknown point; never goes back."""

# CLOCK_MONOTONIC on Linux: one clock for all processes of a machine, so that a deadline written by one process means
# the same instant to another. (A container with a time namespace shifts it for all of its processes alike.)
monotonic_ns: Clock = time.monotonic_ns


class FakeClock:
    """A clock that moves only when told to, or by a fixed tick per reading.

    Args:
        now_ns: first reading.
        tick_ns: added after each reading, so that a loop that waits for a time ends.
    """

    def __init__(self, now_ns: int = 0, tick_ns: int = 0) -> None:
        self.now_ns = now_ns
        self.tick_ns = tick_ns

    def __call__(self) -> int:
        now = self.now_ns
        self.now_ns += self.tick_ns
        return now

    def advance(self, ns: int) -> None:
        self.now_ns += ns
