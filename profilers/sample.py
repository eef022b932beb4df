"""The on-disk schema: cases, samples, summary rows, the environment. Imports no torch.

Every column name that holds a measured number sits beside a `unit` column; a status other than ``ok`` leaves the
number blank. Field order is column order.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields

UNITS: dict[str, str] = {
    "prep_host_us": "us",
    "launch_host_us": "us",
    "replay_host_us": "us",
    "step_host_us": "us",
    "step_alone_us": "us",  # with the other ranks of the same device at rest
    "prep_device_us": "us",
    "prep_device_cold_us": "us",
    "dispatches": "count",
    "launches": "count",
    "syncs": "count",
    "start_lag_us": "us",
    "launch_end_us": "us",
    "launch_skew_us": "us",
    "duration_spread_us": "us",
    "first_wait_us": "us",
    "longest_wait_us": "us",  # of a step's first waits: that of the rank which came first
    "exchange_us": "us",  # the first all-reduce when nobody is late
    "injected_us": "us",
    "sm_clock_mhz": "MHz",  # at the ends of some steps; its cause says what held clocks down
    "bit_equal": "bool",
}
"""Metric -> unit, for ever."""

PREDICTED = "predicted"
MEASURED = "measured"

STATUSES = (
    "ok",  # the number was measured
    "no_device",  # only a GPU could show it
    "not_applicable",  # this arm has no such quantity
    "unsupported",  # the machine or library lacks what it takes
    "compile_failed",
    "capture_failed",
    "failed",
    "interrupted",
)


@dataclass(frozen=True, slots=True)
class Case:
    """One point to measure. `context` is text because it may be a mix (``loguniform:1:131072``)."""

    backend: str
    mode: str
    bs: int
    bucket: int
    context: str
    page_size: int
    max_context: int
    swa: bool
    topk: int = 0
    draft_tokens: int = 0
    draft_steps: int = 0
    step_id: int = 0
    graph_nodes: int = 500
    graph_branches: int = 1
    allreduce_at: int = 10
    tp: int = 1
    device: str = "cuda"
    seed: int = 0

    @property
    def key(self) -> str:
        """Stable text identity, used by --resume and by comparisons of saved runs."""
        return "|".join(str(v) for v in asdict(self).values())

    @property
    def title(self) -> str:
        """Short human name for tables and plots."""
        swa = " swa" if self.swa else ""
        return f"{self.backend} {self.mode} bs {self.bs} ctx {self.context} page {self.page_size}{swa}"


CASE_COLUMNS: tuple[str, ...] = tuple(f.name for f in fields(Case))


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured value of one metric for one arm, rank and step. `step` -1 means: once per case."""

    arm: str
    rank: int
    step: int
    metric: str
    value: float | None
    status: str = "ok"
    cause: str = ""
    source: str = MEASURED
    observer: str = "none"

    def __post_init__(self) -> None:
        if self.metric not in UNITS:
            raise ValueError(f"unknown metric {self.metric!r}. Known: {', '.join(UNITS)}")
        if self.status not in STATUSES:
            raise ValueError(f"unknown status {self.status!r}. Known: {', '.join(STATUSES)}")
        if (self.value is None) == (self.status == "ok"):
            raise ValueError(f"{self.metric}: status {self.status!r} with value {self.value!r}")

    @property
    def unit(self) -> str:
        return UNITS[self.metric]


SAMPLE_COLUMNS: tuple[str, ...] = (
    *CASE_COLUMNS, "arm", "rank", "step", "metric", "unit", "value", "status", "cause", "source", "observer",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ResultRow:
    """One row of summary.csv: a metric of a case and arm on one rank (``all`` pools ranks)."""

    arm: str
    rank: str
    metric: str
    unit: str
    n: int
    p50: float | None
    p90: float | None
    p99: float | None
    mean: float | None
    min: float | None
    max: float | None
    sum: float | None
    p50_low: float | None
    p50_high: float | None
    status: str
    source: str = MEASURED
    observer: str = "none"
    tuned: str = ""


ROW_COLUMNS: tuple[str, ...] = tuple(f.name for f in fields(ResultRow))
SUMMARY_COLUMNS: tuple[str, ...] = (*CASE_COLUMNS, *ROW_COLUMNS)


@dataclass(frozen=True, slots=True)
class Environment:
    """What machine this is and how the run was started. Blank where it could not be read."""

    command: list[str]
    started_at: str
    hostname: str = ""
    os: str = ""
    cpu: str = ""
    cores: int = 0
    affinity_cores: int = 0
    load_1m: float | None = None
    governor: str = ""
    container_cpu_quota: float | None = None
    quota_stops: int | None = None
    affinity_physical_cores: int | None = None
    numa_nodes: list[int] = field(default_factory=list)
    smt: bool | None = None
    turbo: bool | None = None
    clock_source: str = ""
    debugger: str = ""
    memory_gib: float | None = None
    python: str = ""
    torch: str = ""
    triton: str = ""
    cuda: str = ""
    hip: str = ""
    driver: str = ""
    numpy: str = ""
    attn_graph: str = ""
    git_commit: str = ""
    git_dirty: bool | None = None
    gpus: list[dict] = field(default_factory=list)
    visible_devices: str | None = None
    device: str = ""
    tp: int = 1
    options: dict = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    tuned: dict = field(default_factory=dict)
    status: str = "running"
    finished_at: str = ""
