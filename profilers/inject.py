"""The ruler proves itself: a known delay on one rank must come back as waiting on the others, one for one.

The delay is spun, not slept, between the rebuild and the graph launch. Doses alternate from step to step, so that a
host that slows down or speeds up in between does not pass for an effect.
"""

from __future__ import annotations

from dataclasses import dataclass

INJECTED = "inject"
"""Observer that samples of such a run are marked with: their waits and ends are not the arms' own."""

EACH = "each"


@dataclass(frozen=True, slots=True)
class Injection:
    """Who is delayed, and by how much.

    Attributes:
        rank: which; None takes each in turn.
        doses_us: cycled through step by step; 0 is among them as the control.
    """

    rank: int | None
    doses_us: tuple[float, ...]

    def delay_us(self, step: int, rank: int, size: int) -> float | None:
        """Delay of `rank` at `step`; None on the ranks that are not it."""
        dose, turn = step % len(self.doses_us), step // len(self.doses_us)
        chosen = turn % size if self.rank is None else self.rank
        return self.doses_us[dose] if rank == chosen else None


def parse_injection(text: str) -> Injection:
    """``RANK:US`` or ``RANK:US,US,...``; RANK may be ``each``.

    Raises:
        ValueError: anything else.
    """
    who, colon, doses = text.partition(":")
    try:
        if not colon:
            raise ValueError
        rank = None if who == EACH else int(who)
        amounts = [float(dose) for dose in doses.split(",")]
        if (rank is not None and rank < 0) or any(not 0 <= amount < 1e6 for amount in amounts):
            raise ValueError
    except ValueError:
        raise ValueError(
            f"--inject {text!r}: give RANK:US, like 1:100 or each:50,100,200, with delays below a second"
        ) from None
    return Injection(rank, tuple(dict.fromkeys([0.0, *amounts])))
