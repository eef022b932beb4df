"""The default first, then the others in random order: what is seen when time runs out is a fair sample."""

from __future__ import annotations

import random
from collections.abc import Sequence

from .space import Candidate
from .trials import Round, Rounds, Seen


def search(candidates: Sequence[Candidate], seed: int, near: Sequence[Seen] = ()) -> Rounds:
    yield Round(shuffled(candidates, seed))


def shuffled(candidates: Sequence[Candidate], seed: int) -> list[Candidate]:
    """The first, then the others in the seed's order."""
    default, *others = candidates
    random.Random(seed).shuffle(others)
    return [default, *others]
