"""Where the time of a run went, and why some steps were slow: sums beside medians, slow steps grouped by cause.

Made from the samples alone. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .results import cases_in, read_samples

if TYPE_CHECKING:
    import pandas as pd

SLOW = "slow.csv"
METRICS = ("prep_host_us", "launch_host_us", "first_wait_us")
ALL = "all"


@dataclass(frozen=True, slots=True)
class SlowRow:
    """One row of slow.csv. `cause` ``all``: every step of a case, arm and metric; else its slow steps of that cause.

    Attributes:
        cause: as the samples carry it; several that met in one step are joined by ``+``.
        source: ``measured`` or ``predicted``.
        steps: of all ranks.
        p50_us, sum_us: of these steps.
        excess_us: what these steps took beyond the median of all steps, in sum; for ``all`` only what lay above it.
        share: of the time in all steps.
    """

    case: str
    arm: str
    metric: str
    source: str
    cause: str
    steps: int
    p50_us: float
    sum_us: float
    excess_us: float
    share: float


def slow_rows(samples: pd.DataFrame) -> Iterator[SlowRow]:
    """From samples as `results.read_samples` gives them; numbers taken under a tracer are left out."""
    bare = samples[(samples["status"] == "ok") & (samples["observer"] == "none") & (samples["step"] >= 0)]
    for case, of_case in cases_in(bare[bare["metric"].isin(METRICS)]):
        keys = ["arm", "metric", "source"]
        for (arm, metric, source), rows in of_case.groupby(keys, sort=False, observed=True):
            values = rows["value"].to_numpy()
            p50, total = float(np.median(values)), float(values.sum())
            above = float(np.maximum(values - p50, 0).sum())
            yield SlowRow(case.title, arm, metric, source, ALL, len(values), p50, total, above, 1.0)
            causes = rows["cause"].astype(str)
            groups = [(cause, values[(causes == cause).to_numpy()]) for cause in causes.unique() if cause]
            for cause, slow in sorted(groups, key=lambda group: -(group[1] - p50).sum()):
                share = float(slow.sum()) / total if total else 0.0
                excess = float((slow - p50).sum())
                yield SlowRow(
                    case.title, arm, metric, source, cause, len(slow), float(np.median(slow)), float(slow.sum()),
                    excess, share,
                )  # fmt: skip


def write_slow(folder: Path) -> list[SlowRow]:
    """Write slow.csv into the folder of a run, and return its rows."""
    import pandas as pd

    rows = list(slow_rows(read_samples(folder)))
    if rows:
        frame = pd.DataFrame([asdict(row) for row in rows], columns=[f.name for f in fields(SlowRow)])
        frame.to_csv(Path(folder) / SLOW, index=False, lineterminator="\n", float_format="%.6g")
    return rows
