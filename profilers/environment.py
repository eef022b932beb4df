"""What machine this is, and what on it may spoil a measurement.

`collect` reads; `checks` and `differences` judge what was read, so both work on a saved environment.json too. Whatever
cannot be read stays blank.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

from .devices import (
    CudaRecord,
    Device,
    GpuRecord,
    Runtime,
    nvml_gpus,
    nvml_session,
    physical_gpu,
    text,
    torch_runtime,
    visible_gpus,
)
from .nvtx_ranges import range_state
from .sample import Environment

LEVELS = ("info", "warning", "error")
"""info: worth knowing. warning: may move the numbers. error: the numbers would mean something else."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that may spoil a measurement: what was found, and what to do about it."""

    name: str
    level: str
    found: str
    advice: str

    def __str__(self) -> str:
        return f"{self.name}: {self.found}. {self.advice}"


def collect(
    command: Sequence[str],
    options: Mapping[str, Any],
    device: Device,
    *,
    tp: int = 1,
    runtime: Callable[[], Runtime] = torch_runtime,
) -> Environment:
    """Everything about this machine that a reader of the results will ask for.

    Args:
        command: the full command line.
        options: resolved options of the run.
        device: from `devices.resolve`.
        tp: the largest number of ranks of the run.
        runtime: what PyTorch can use; asked only if the device is a GPU, so that a CPU run starts no driver.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    environment = Environment(
        command=list(command),
        started_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        hostname=platform.node(),
        os=platform.platform(),
        cpu=cpu_model(),
        cores=os.cpu_count() or 0,
        affinity_cores=len(allowed_cores()),
        load_1m=round(psutil.getloadavg()[0], 2),
        governor=governors(allowed_cores()),
        container_cpu_quota=cpu_quota(),
        quota_stops=quota_stops(),
        affinity_physical_cores=physical_cores(allowed_cores()),
        numa_nodes=numa_nodes(allowed_cores()),
        smt=smt(),
        turbo=turbo(),
        clock_source=clock_source(),
        debugger=debugger(),
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        python=platform.python_version(),
        triton=_version("triton"),
        driver=driver_version(),
        numpy=_version("numpy"),
        attn_graph=_version("attn-graph"),
        gpus=gpu_reports(runtime().devices if device.is_cuda else (), visible),
        visible_devices=visible,
        device=device.title,
        tp=tp,
        options=dict(options),
        **torch_versions(),
        **source_version(Path(__file__).resolve().parents[1]),
    )
    serious = [str(check) for check in checks(environment) if check.level != "info"]
    return replace(environment, warnings=serious)


# Processor and container.


def allowed_cores() -> tuple[int, ...]:
    """Cores that this process may run on, by number."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 0))


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Name of the first processor."""
    for line in _read(cpuinfo).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def governors(cores: Sequence[int], root: Path = Path("/sys/devices/system/cpu")) -> str:
    """Frequency governors of these cores, e.g. ``performance``; blank where the kernel shows none (most VMs)."""
    found = {_read(root / f"cpu{core}/cpufreq/scaling_governor").strip() for core in cores}
    return ", ".join(sorted(found - {""}))


def cpu_quota(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """CPUs' worth of time that the container may use, from cgroup v2 or v1; None without a limit.

    A limit on any enclosing group holds, so the smallest counts.
    """
    limits = [limit for group in _groups(root, _read(membership)) if (limit := _group_quota(group)) is not None]
    return min(limits, default=None)


def _groups(root: Path, membership: str) -> Iterator[Path]:
    """Folders of our cgroup and those around it. Lines are ``id:controllers:path``; v2 has no controllers."""
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        tops = [root / controllers, root / "cpu"] if controllers else [root, root / "unified"]
        for top in tops:
            # In a container the path may be the host's, absent below this mount: then the mount is the group.
            folder = top / path.lstrip("/")
            yield folder
            yield from (parent for parent in folder.parents if parent == top or top in parent.parents)


def _group_quota(group: Path) -> float | None:
    fields = _read(group / "cpu.max").split() or [
        _read(group / "cpu.cfs_quota_us").strip(),
        _read(group / "cpu.cfs_period_us").strip(),
    ]
    try:
        quota_us, period_us = map(int, fields)
    except ValueError:  # "max", or no such files
        return None
    return quota_us / period_us if quota_us > 0 and period_us > 0 else None  # v1 writes -1 for no limit


def quota_stops(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int | None:
    """How often the kernel has stopped this container, or one around it, for using up its quota; None if untold."""
    counts = [
        int(value)
        for group in _groups(root, _read(membership))
        for key, _, value in (line.partition(" ") for line in _read(group / "cpu.stat").splitlines())
        if key == "nr_throttled"
    ]
    return max(counts, default=None)


def smt(root: Path = Path("/sys/devices/system/cpu")) -> bool | None:
    """Whether cores run two threads each (hyper-threading)."""
    return {"1": True, "0": False}.get(_read(root / "smt/active").strip())


def turbo(root: Path = Path("/sys/devices/system/cpu")) -> bool | None:
    """Whether cores may run above their nominal clock; None where the kernel shows no switch (most VMs)."""
    intel = _read(root / "intel_pstate/no_turbo").strip()
    return {"1": True, "0": False}.get({"0": "1", "1": "0"}.get(intel, _read(root / "cpufreq/boost").strip()))


def physical_cores(cores: Sequence[int], root: Path = Path("/sys/devices/system/cpu")) -> int | None:
    """How many physical cores these logical ones are; None where Linux does not say."""
    topology = [root / f"cpu{core}/topology" for core in cores]
    found = {(_read(at / "physical_package_id"), _read(at / "core_id")) for at in topology}
    return None if not found or ("", "") in found else len(found)


def numa_nodes(cores: Sequence[int], root: Path = Path("/sys/devices/system/node")) -> list[int]:
    """Memory nodes that these logical cores belong to; empty where Linux does not say."""
    return sorted({node for core, node in node_of_core(root).items() if core in cores})


def node_of_core(root: Path = Path("/sys/devices/system/node")) -> dict[int, int]:
    """Logical core -> memory node; empty where Linux does not say."""
    return {core: int(path.name[4:]) for path in root.glob("node[0-9]*") for core in _cpu_list(_read(path / "cpulist"))}


def _cpu_list(text: str) -> set[int]:
    """``0-3,8`` as a set."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}


def clock_source(root: Path = Path("/sys/devices/system/clocksource/clocksource0")) -> str:
    """What the kernel takes the time from."""
    return _read(root / "current_clocksource").strip()


def debugger(status: Path = Path("/proc/self/status")) -> str:
    """Process that traces this one (gdb, strace), as ``pid name``; blank without one."""
    for line in _read(status).splitlines():
        key, _, value = line.partition(":")
        if key == "TracerPid" and (pid := int(value)):
            try:
                return f"{pid} {psutil.Process(pid).name()}"
            except psutil.Error:
                return str(pid)
    return ""


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


# Versions.


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def torch_versions() -> dict[str, str]:
    """`torch`, `cuda` and `hip` as fields of Environment. Imports torch; a broken one leaves the last two blank."""
    try:
        import torch
    except (ImportError, OSError):
        return {"torch": _version("torch")}
    return {"torch": torch.__version__, "cuda": torch.version.cuda or "", "hip": torch.version.hip or ""}


def source_version(root: Path) -> dict[str, Any]:
    """Git commit of a checkout at `root`, and whether tracked files differ from it. Empty for an installed copy."""
    # An installed copy may well lie in a virtual environment inside somebody's repository: that is not our commit.
    if not (root / ".git").exists():
        return {}
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None:
        return {}
    changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    return {"git_commit": commit, "git_dirty": None if changes is None else bool(changes)}


def _git(root: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(root), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


# GPUs.


def driver_version() -> str:
    """NVIDIA driver version; blank without one."""
    with nvml_session() as nvml:
        return "" if nvml is None else text(nvml.nvmlSystemGetDriverVersion())


def gpu_reports(records: Sequence[CudaRecord], mask: str | None) -> list[dict]:
    """One dict per physical GPU, `cuda_index` telling which CUDA index it has here (None: not in use).

    Without NVML (ROCm, or no nvidia-ml-py) only what the runtime says about its own devices.
    """
    gpus = nvml_gpus()
    if not gpus:
        return [{"name": record.name, "uuid": record.uuid, "cuda_index": record.index} for record in records]
    shown = visible_gpus(mask, gpus)
    matched = {record.index: physical_gpu(record, gpus, shown) for record in records}
    index_of = {found.gpu.index: index for index, found in matched.items() if found is not None}
    with nvml_session() as nvml:
        return [gpu_report(nvml, gpu) | {"cuda_index": index_of.get(gpu.index)} for gpu in gpus]


def gpu_report(nvml: ModuleType, gpu: GpuRecord) -> dict:
    """Clocks, limits, throttling and other users of one GPU. None where this GPU does not say.

    Args:
        nvml: `pynvml`, initialised.
    """
    handle = nvml.nvmlDeviceGetHandleByIndex(gpu.index)

    def ask(function: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, function)(handle, *arguments)
        except (nvml.NVMLError, AttributeError):  # not supported here, no permission, or older bindings
            return None

    memory = ask("nvmlDeviceGetMemoryInfo")
    persistence = ask("nvmlDeviceGetPersistenceMode")
    power_mw, limit_mw = ask("nvmlDeviceGetPowerUsage"), ask("nvmlDeviceGetEnforcedPowerLimit")
    return {
        "index": gpu.index,
        "name": gpu.name,
        "uuid": gpu.uuid,
        "pci": "{:08x}:{:02x}:{:02x}".format(*gpu.pci),
        "numa_node": gpu_numa_node(gpu.pci),
        "memory_gib": None if memory is None else round(memory.total / 2**30, 1),
        "sm_clock_mhz": ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        "sm_clock_max_mhz": ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
        "memory_clock_mhz": ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
        "temperature_c": ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        "power_w": None if power_mw is None else power_mw / 1000,
        "power_limit_w": None if limit_mw is None else limit_mw / 1000,
        "throttle_reasons": throttle_reasons(nvml, ask("nvmlDeviceGetCurrentClocksThrottleReasons")),
        "persistence": None if persistence is None else bool(persistence),
        "mig": len(gpu.mig_uuids),
        "other_processes": [_process(p) for p in _others(ask("nvmlDeviceGetComputeRunningProcesses") or ())],
    }


def gpu_numa_node(pci: Sequence[int], root: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """Memory node that a GPU hangs on; None where Linux does not say (VMs write -1)."""
    text = _read(root / "{:04x}:{:02x}:{:02x}.0".format(*pci) / "numa_node").strip()
    return int(text) if text.isdigit() else None


THROTTLES = {
    "nvmlClocksThrottleReasonSwPowerCap": "power cap",
    "nvmlClocksThrottleReasonHwSlowdown": "hardware slowdown",
    "nvmlClocksThrottleReasonSwThermalSlowdown": "thermal (software)",
    "nvmlClocksThrottleReasonHwThermalSlowdown": "thermal (hardware)",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "power brake",
}
"""NVML's bit names -> words. Left out: idle, clocks set by the user, sync boost, display; none is a fault."""


def throttle_reasons(nvml: ModuleType, bits: int | None) -> list[str] | None:
    """The reasons in NVML's bit set that slow a GPU down against its owner's will."""
    if bits is None:
        return None
    return [words for name, words in THROTTLES.items() if bits & getattr(nvml, name)]


def _others(processes: Sequence[Any]) -> list[Any]:
    """Compute processes that are neither this one nor its children."""
    ours = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    return [process for process in processes if process.pid not in ours]


def _process(process: Any) -> dict:
    try:
        name = psutil.Process(process.pid).name()
    except psutil.Error:  # another container's, by the host's number
        name = ""
    used = process.usedGpuMemory
    return {"pid": process.pid, "name": name, "memory_mib": None if used is None else used // 2**20}


# What may spoil a measurement.


def checks(environment: Environment, variables: Mapping[str, str] | None = None) -> list[Check]:
    """What may spoil a measurement on this machine, worst first.

    Args:
        variables: the process environment; os.environ by default.
    """
    variables = os.environ if variables is None else variables
    found = [
        *_cpu_checks(environment),
        *_gpu_checks(environment),
        *_variable_checks(environment, variables),
    ]
    return by_level(found)


def by_level(found: Sequence[Check]) -> list[Check]:
    """Worst first, else as they came."""
    return sorted(found, key=lambda check: -LEVELS.index(check.level))


SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies", "refined-jiffies")
"""Clock sources that cost a system call or are too coarse; a reading then takes longer than what is timed."""


def _cpu_checks(env: Environment) -> Iterator[Check]:
    if env.governor and env.governor != "performance":
        yield Check(
            "governor",
            "warning",
            f"CPU frequency governor is {env.governor}",
            "Host times will wander; set it with 'cpupower frequency-set -g performance'",
        )
    if env.turbo:
        yield Check(
            "turbo",
            "info",
            "cores may run above their nominal clock",
            "Host times then depend on heat and on how many cores are busy; compare arms within a run only",
        )
    if env.affinity_cores < env.tp:
        yield Check(
            "affinity",
            "warning",
            f"{env.tp} ranks share {env.affinity_cores} of {env.cores} cores",
            "Rank skew will show the scheduler, not the rebuild; lower --tp or widen the affinity (taskset, cpuset)",
        )
    elif env.smt and env.affinity_physical_cores is not None and env.affinity_physical_cores < env.tp:
        yield Check(
            "SMT",
            "warning",
            f"{env.tp} ranks on {env.affinity_physical_cores} physical cores: some share one",
            "Two threads of a core slow each other down; lower --tp or widen the affinity",
        )
    if len(env.numa_nodes) > 1 and env.tp == 1:
        yield Check(
            "NUMA",
            "info",
            f"the usable cores are on memory nodes {', '.join(map(str, env.numa_nodes))}",
            "A thread that moves to another node finds its memory far away; pin it with 'numactl -N NODE -m NODE'",
        )
    quota = env.container_cpu_quota
    if quota is not None and quota < max(env.tp, env.affinity_cores):
        yield Check(
            "cpu quota",
            "warning" if quota < env.tp else "info",
            f"the container may use {quota:g} CPUs of {env.affinity_cores}",
            "Above it the kernel stops every thread until the next period; raise the limit or lower --tp",
        )
    if quota is not None and env.quota_stops:
        yield Check(
            "cpu quota",
            "info",
            f"the kernel has stopped the container {env.quota_stops} times for using up its quota",
            "A stop lasts up to 100 ms; if the count grows during a run, raise the limit",
        )
    # A load of one core is the least that any running shell or build shows on a small machine.
    if env.load_1m is not None and env.load_1m > max(env.affinity_cores - env.tp, 1):
        yield Check(
            "load",
            "warning",
            f"load is {env.load_1m:g} on {env.affinity_cores} cores before the {env.tp} ranks start",
            "Other work will preempt ranks; stop it, or read the slow samples' causes",
        )
    if env.clock_source in SLOW_CLOCKS:
        yield Check(
            "clock",
            "warning",
            f"the kernel takes the time from {env.clock_source}",
            "Reading the clock takes microseconds; boot with 'tsc=reliable' if the machine's TSC can be trusted",
        )
    if env.debugger:
        yield Check(
            "debugger",
            "error",
            f"process {env.debugger} traces this one",
            "Every system call may stop for it; detach gdb or strace",
        )


def _gpu_checks(env: Environment) -> Iterator[Check]:
    if env.device.startswith("cpu"):
        yield Check("device", "info", env.device, "Times that only a GPU can show are left blank")
    for gpu in env.gpus:
        if gpu["cuda_index"] is None:
            continue
        name = f"cuda:{gpu['cuda_index']}"
        others = gpu.get("other_processes") or []
        if others:
            listed = ", ".join(f"{p['pid']} {p['name']}".strip() for p in others)
            yield Check(
                name,
                "warning",
                f"other processes use this GPU: {listed}",
                "Device times and launches will include waiting for them; stop them or choose another GPU",
            )
        if gpu.get("throttle_reasons"):
            yield Check(
                name,
                "warning",
                f"clocks are held down: {', '.join(gpu['throttle_reasons'])}",
                "Let it cool or raise the power limit ('nvidia-smi -q -d PERFORMANCE')",
            )
        if gpu.get("mig"):
            yield Check(
                name,
                "warning",
                f"MIG is on ({gpu['mig']} instances)",
                "Times are those of a slice of the GPU; do not compare them with a whole one",
            )
        node = gpu.get("numa_node")
        if node is not None and env.numa_nodes and node not in env.numa_nodes:
            near = ", ".join(map(str, env.numa_nodes))
            yield Check(
                name,
                "warning",
                f"the GPU hangs on memory node {node}, the usable cores are on {near}",
                f"Every launch crosses the sockets; start with 'numactl -N {node} -m {node}'",
            )
        if gpu.get("persistence") is False:
            yield Check(
                name,
                "info",
                "persistence mode is off",
                "The first use of the GPU is slow; switch it on with 'nvidia-smi -pm 1'",
            )


LAUNCH_BLOCKING = ("CUDA_LAUNCH_BLOCKING", "HIP_LAUNCH_BLOCKING", "AMD_SERIALIZE_KERNEL")
TEARDOWN = "TEARDOWN_CUPTI"  # PyTorch's profiler takes CUPTI down at its end if this is 1
TRACERS = ("CUDA_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID", "KINETO_USE_DAEMON", "HSA_TOOLS_LIB")


def attached_tracer(variables: Mapping[str, str] = os.environ) -> str:
    """What looks over this process's shoulder: ``cuda`` (an injected tracer of the runtime), ``nvtx`` (a tool that
    receives our ranges) or ``none``. Numbers taken under one are marked with it: tracing a graph launch costs many
    times the launch."""
    if any(variables.get(name) for name in TRACERS):
        return "cuda"
    return "nvtx" if range_state() == "traced" else "none"


_OFF = ("", "0")


def _variable_checks(env: Environment, variables: Mapping[str, str]) -> Iterator[Check]:
    def is_set(name: str) -> bool:
        return variables.get(name, "") not in _OFF

    for name in filter(is_set, LAUNCH_BLOCKING):
        yield Check(
            name,
            "error",
            f"set to {variables[name]}: every launch waits for the device",
            f"Host times would be device times; unset {name}",
        )
    for name in filter(is_set, TRACERS):
        yield Check(
            name,
            "warning",
            f"set to {variables[name]}: a tracer is attached",
            "Graph launches can cost 50 times as much while traced; unset it for a bare measurement",
        )
    if is_set("NVTX_INJECTION64_PATH"):
        yield Check(
            "NVTX_INJECTION64_PATH",
            "warning",
            f"set to {variables['NVTX_INJECTION64_PATH']}: a library receives every NVTX range",
            "'attn-graph env' shows what a range costs with it; unset it for a bare measurement",
        )
    if is_set("TRITON_INTERPRET") and not env.device.startswith("cpu"):
        yield Check(
            "TRITON_INTERPRET",
            "error",
            "set although a GPU is in use: kernels run in Triton's interpreter",
            "No time of a fused arm would mean anything; unset TRITON_INTERPRET",
        )
    if not env.device.startswith("cpu") and variables.get(TEARDOWN) != "1":
        yield Check(
            TEARDOWN,
            "info",
            "not set to 1: once torch.profiler has run in a process, later graph launches may stay slow",
            f"Set {TEARDOWN}=1 before the start of a process that is to serve on afterwards; see docs/live-servers.md",
        )


MOST_PER_NODE_US = 0.05
"""A bare launch costs 0.002 to 0.01 us per node, one in a process that CUPTI was used in 0.2 and more."""


def launch_check(fixed_us: float, per_node_us: float) -> Iterator[Check]:
    """What a measured launch cost says: whether something looks on, or has left something behind."""
    if per_node_us > MOST_PER_NODE_US:
        yield Check(
            "graph launch",
            "error",
            f"a launch takes {fixed_us:.1f} us and {per_node_us:.3f} us per node, where 0.01 is usual",
            "A tracer is attached, or was and left CUPTI behind; start afresh without one, see docs/live-servers.md",
        )


def process_checks(pid: int) -> list[Check]:
    """What a live process was started with that makes its launches slow, or will once it is profiled.

    Sees the variables of its start; what it has set itself later stays unseen.

    Raises:
        EnvironmentProblem: no such process, or not ours to look at.
    """
    try:
        variables = psutil.Process(pid).environ()
    except psutil.Error as error:
        raise EnvironmentProblem(f"--pid {pid}: {type(error).__name__}. Give a running process of this user") from None
    traced = debugger(Path(f"/proc/{pid}/status"))
    there = Environment(command=[], started_at="", affinity_cores=1, device=f"process {pid}", debugger=traced)
    return checks(there, variables)


class EnvironmentProblem(ValueError):
    """Something that was to be looked at is not there; says what and what to do."""


COMPARED = (
    "cpu", "cores", "affinity_cores", "container_cpu_quota", "governor", "os", "driver", "python", "torch", "triton",
    "cuda", "hip", "tp",
)  # fmt: skip


def differences(baseline: Environment, candidate: Environment) -> list[Check]:
    """What differs between the machines of two runs and may explain a difference in their numbers."""
    pairs = [(name, getattr(baseline, name), getattr(candidate, name)) for name in COMPARED]
    pairs.append(("GPUs", _used_gpus(baseline), _used_gpus(candidate)))
    found = [
        Check(name, "warning", f"{before} in the baseline, {after} in the candidate", "Compare runs of like machines")
        for name, before, after in pairs
        if before != after
    ]
    loads = (baseline.load_1m, candidate.load_1m)
    if None not in loads and abs(loads[0] - loads[1]) > max(1.0, 0.1 * baseline.cores):
        advice = "One side had more company; repeat both on an idle machine"
        found.append(Check("load", "warning", f"{loads[0]:g} in the baseline, {loads[1]:g} in the candidate", advice))
    return found


def _used_gpus(environment: Environment) -> list[str]:
    return [gpu["name"] for gpu in environment.gpus if gpu["cuda_index"] is not None]
