"""What is read about a machine, from made-up files and a made-up NVML, and what is said to spoil a measurement."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from types import SimpleNamespace

import psutil
import pytest
from attn_graph.profilers import environment
from attn_graph.profilers.devices import Device, GpuRecord
from attn_graph.profilers.environment import (
    EnvironmentProblem,
    checks,
    clock_source,
    collect,
    cpu_model,
    cpu_quota,
    debugger,
    differences,
    governors,
    gpu_numa_node,
    gpu_report,
    launch_check,
    numa_nodes,
    physical_cores,
    process_checks,
    quota_stops,
    smt,
    source_version,
    throttle_reasons,
    turbo,
)
from attn_graph.profilers.sample import Environment

GPU = {
    "index": 0,
    "name": "NVIDIA H200",
    "cuda_index": 0,
    "throttle_reasons": [],
    "persistence": True,
    "mig": 0,
    "other_processes": [],
}
QUIET = Environment(
    command=["attn-graph"],
    started_at="",
    cores=16,
    affinity_cores=16,
    load_1m=0.2,
    governor="performance",
    tp=8,
    device="cuda:0, NVIDIA H200",
    gpus=[GPU],
)


def found(variables=None, **changes) -> list[tuple[str, str]]:
    variables = {"TEARDOWN_CUPTI": "1"} | (variables or {})
    return [(check.name, check.level) for check in checks(replace(QUIET, **changes), variables)]


def test_a_quiet_machine_has_no_findings():
    assert found() == []
    assert found({"CUDA_LAUNCH_BLOCKING": "0", "CUDA_INJECTION64_PATH": ""}) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"governor": "powersave"}, [("governor", "warning")]),
        ({"governor": "performance, powersave"}, [("governor", "warning")]),
        ({"governor": ""}, []),
        ({"affinity_cores": 8}, []),
        ({"affinity_cores": 7}, [("affinity", "warning")]),
        ({"container_cpu_quota": 16.0}, []),
        ({"container_cpu_quota": 8.0}, [("cpu quota", "info")]),
        ({"container_cpu_quota": 7.5}, [("cpu quota", "warning")]),
        ({"load_1m": 8.0}, []),
        ({"load_1m": 8.1}, [("load", "warning")]),
        ({"load_1m": 0.9, "tp": 16}, []),
        ({"load_1m": 1.1, "tp": 16}, [("load", "warning")]),
        ({"load_1m": None}, []),
        ({"device": "cpu, no GPU: x", "gpus": []}, [("device", "info")]),
        ({"turbo": True}, [("turbo", "info")]),
        ({"turbo": False, "smt": True, "affinity_physical_cores": 8}, []),
        ({"smt": True, "affinity_physical_cores": 7}, [("SMT", "warning")]),
        ({"smt": False, "affinity_physical_cores": 7}, []),
        ({"smt": True, "affinity_physical_cores": 4, "affinity_cores": 7}, [("affinity", "warning")]),
        ({"numa_nodes": [0, 1], "tp": 1}, [("NUMA", "info")]),
        ({"numa_nodes": [0], "tp": 1}, []),
        ({"container_cpu_quota": 8.0, "quota_stops": 3}, [("cpu quota", "info")] * 2),
        ({"container_cpu_quota": 16.0, "quota_stops": 0}, []),
        ({"quota_stops": 3}, []),
        ({"clock_source": "hpet"}, [("clock", "warning")]),
        ({"clock_source": "tsc"}, []),
        ({"clock_source": "kvm-clock"}, []),
        ({"debugger": "7 gdb"}, [("debugger", "error")]),
    ],
)
def test_processor_findings(changes, expected):
    assert found(**changes) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"other_processes": [{"pid": 7, "name": "python", "memory_mib": 1}]}, [("cuda:0", "warning")]),
        ({"throttle_reasons": ["power cap"]}, [("cuda:0", "warning")]),
        ({"mig": 2}, [("cuda:0", "warning")]),
        ({"persistence": False}, [("cuda:0", "info")]),
        ({"numa_node": 1}, []),  # not known where our cores are
        ({"persistence": None, "throttle_reasons": None, "other_processes": None}, []),
    ],
)
def test_gpu_findings_only_of_gpus_in_use(changes, expected):
    assert found(gpus=[GPU | changes]) == expected
    assert found(gpus=[GPU | changes | {"cuda_index": None}]) == []


def test_a_gpu_on_another_socket_than_the_cores_is_named():
    far = [GPU | {"numa_node": 1}]
    assert found(gpus=far, numa_nodes=[0]) == [("cuda:0", "warning")]
    assert found(gpus=far, numa_nodes=[1]) == [] == found(gpus=far, numa_nodes=[0, 1])


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("CUDA_LAUNCH_BLOCKING", "error"),
        ("HIP_LAUNCH_BLOCKING", "error"),
        ("TRITON_INTERPRET", "error"),
        ("CUDA_INJECTION64_PATH", "warning"),
        ("NVTX_INJECTION64_PATH", "warning"),
        ("KINETO_USE_DAEMON", "warning"),
    ],
)
def test_variables_that_change_what_is_measured(name, level):
    assert found({name: "1"}) == [(name, level)]


def test_the_interpreter_is_right_where_there_is_no_gpu():
    assert found({"TRITON_INTERPRET": "1"}, device="cpu", gpus=[]) == [("device", "info")]


def test_a_gpu_user_is_told_what_profiling_leaves_behind_unless_it_is_torn_down():
    for value in ("0", "", "yes"):
        assert found({"TEARDOWN_CUPTI": value}) == [("TEARDOWN_CUPTI", "info")]
    assert found({"TEARDOWN_CUPTI": "0"}, device="cpu", gpus=[]) == [("device", "info")]


def test_a_launch_that_costs_by_the_node_is_an_error_and_a_bare_one_is_not():
    assert [c.level for c in launch_check(6.0, 0.19)] == ["error"]  # left behind by a CPU-only profile on an H200
    assert [c.level for c in launch_check(6.0, 0.71)] == ["error"]  # traced
    assert list(launch_check(34.0, 0.011)) == []  # a slow host, untraced


def test_a_live_process_is_judged_by_the_variables_it_was_started_with():
    def names(**variables) -> list[str]:
        start = {k: v for k, v in os.environ.items() if not k.startswith(("TEARDOWN", "TRITON", "CUDA", "NVTX"))}
        start |= variables
        idle = "import sys; print(flush=True); sys.stdin.read()"
        child = subprocess.Popen([sys.executable, "-c", idle], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=start)
        child.stdout.readline()  # just started, a process has no variables to read yet
        try:
            return [check.name for check in process_checks(child.pid)]
        finally:
            child.communicate()

    assert names() == ["TEARDOWN_CUPTI"]
    assert names(TEARDOWN_CUPTI="1") == []
    assert names(TEARDOWN_CUPTI="1", CUDA_INJECTION64_PATH="/x.so") == ["CUDA_INJECTION64_PATH"]
    with pytest.raises(EnvironmentProblem, match="--pid 1073741824: NoSuchProcess"):
        process_checks(2**30)


def test_the_worst_comes_first():
    several = found({"CUDA_LAUNCH_BLOCKING": "1"}, container_cpu_quota=9.0, governor="powersave")
    assert [level for _, level in several] == ["error", "warning", "info"]


@pytest.mark.parametrize(
    ("files", "membership", "quota"),
    [
        ({"cpu.max": "200000 100000\n"}, "0::/\n", 2.0),
        ({"cpu.max": "max 100000\n"}, "0::/\n", None),
        ({"a/cpu.max": "400000 100000", "a/b/cpu.max": "max 100000"}, "0::/a/b\n", 4.0),
        ({"a/cpu.max": "150000 100000", "a/b/cpu.max": "400000 100000"}, "0::/a/b\n", 1.5),
        ({"cpu.max": "300000 100000"}, "0::/docker/of-the-host\n", 3.0),
        ({"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"}, "4:cpu:/\n0::/\n", 2.5),
        ({"cpu,cpuacct/x/cpu.cfs_quota_us": "50000", "cpu,cpuacct/x/cpu.cfs_period_us": "100000"},
         "4:cpu,cpuacct:/x\n", 0.5),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "4:cpu:/\n", None),
        ({"memory/cpu.max": "1 1"}, "4:memory:/\n", None),
        ({"other/cpu.max": "100000 100000"}, "0::/a\n", None),
        ({}, "", None),
    ],
)  # fmt: skip
def test_cpu_quota_of_both_cgroup_versions_is_the_smallest_around_us(tmp_path, files, membership, quota):
    for name, content in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    (tmp_path / "self").write_text(membership)
    assert cpu_quota(tmp_path / "cgroup", tmp_path / "self") == quota


def test_governors_are_those_of_the_cores_we_may_use(tmp_path):
    for core, governor in enumerate(("powersave", "performance", "performance")):
        folder = tmp_path / f"cpu{core}" / "cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_governor").write_text(governor + "\n")
    assert governors((1, 2), tmp_path) == "performance"
    assert governors((0, 1), tmp_path) == "performance, powersave"
    assert governors((9,), tmp_path) == ""


def write(root, **files):
    """Files under `root`; ``__`` in a name is a slash."""
    for name, content in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def test_smt_turbo_and_clock_are_read_where_the_kernel_shows_them(tmp_path):
    assert (smt(tmp_path), turbo(tmp_path), clock_source(tmp_path)) == (None, None, "")
    write(tmp_path, smt__active="1\n", cpufreq__boost="1\n", current_clocksource="hpet\n")
    assert (smt(tmp_path), turbo(tmp_path), clock_source(tmp_path)) == (True, True, "hpet")
    write(tmp_path, intel_pstate__no_turbo="1\n", smt__active="0\n")  # Intel's switch says what is off
    assert (smt(tmp_path), turbo(tmp_path)) == (False, False)
    write(tmp_path, intel_pstate__no_turbo="0\n")
    assert turbo(tmp_path) is True


def test_two_threads_of_a_core_are_one_physical_core(tmp_path):
    for cpu, (package, core) in enumerate(((0, 0), (0, 0), (0, 1), (1, 0))):
        write(tmp_path / f"cpu{cpu}" / "topology", physical_package_id=f"{package}\n", core_id=f"{core}\n")
    assert physical_cores((0, 1), tmp_path) == 1
    assert physical_cores((0, 1, 2, 3), tmp_path) == 3
    assert physical_cores((0, 9), tmp_path) is None and physical_cores((), tmp_path) is None


def test_memory_nodes_are_those_of_the_cores_we_may_use(tmp_path):
    write(tmp_path, node0__cpulist="0-3,8\n", node1__cpulist="4-7\n", node2__cpulist="\n", nodeinfo="x")
    assert numa_nodes((1, 8), tmp_path) == [0]
    assert numa_nodes((3, 4), tmp_path) == [0, 1]
    assert numa_nodes((9,), tmp_path) == []


def test_the_memory_node_of_a_gpu_is_read_by_its_bus_address(tmp_path):
    write(tmp_path / "0000:1b:00.0", numa_node="1\n")
    write(tmp_path / "0000:2b:00.0", numa_node="-1\n")
    assert gpu_numa_node((0, 0x1B, 0), tmp_path) == 1
    assert gpu_numa_node((0, 0x2B, 0), tmp_path) is None and gpu_numa_node((0, 1, 0), tmp_path) is None


def test_stops_of_the_quota_are_the_most_that_any_group_around_us_saw(tmp_path):
    (tmp_path / "self").write_text("0::/a/b\n")
    assert quota_stops(tmp_path / "cgroup", tmp_path / "self") is None
    stat = "usage_usec 5\nnr_periods 9\nnr_throttled {}\nthrottled_usec 7\n"
    for group, stops in (("a", 4), ("a/b", 2)):
        (tmp_path / "cgroup" / group).mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / group / "cpu.stat").write_text(stat.format(stops))
    assert quota_stops(tmp_path / "cgroup", tmp_path / "self") == 4


def test_a_debugger_is_named(tmp_path):
    status = tmp_path / "status"
    status.write_text("Name:\tx\nTracerPid:\t0\n")
    assert debugger(status) == "" and debugger(tmp_path / "absent") == ""
    status.write_text(f"TracerPid:\t{os.getpid()}\n")
    assert debugger(status) == f"{os.getpid()} {psutil.Process().name()}"
    status.write_text(f"TracerPid:\t{2**30}\n")
    assert debugger(status) == str(2**30)


def test_cpu_model_is_read_or_falls_back(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Fast CPU @ 3 GHz\nmodel name\t: other\n")
    assert cpu_model(tmp_path / "cpuinfo") == "Fast CPU @ 3 GHz"
    assert cpu_model(tmp_path / "absent")


def git(folder, *arguments):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


def test_commit_and_changes_of_a_checkout(tmp_path):
    git(tmp_path, "init")
    (tmp_path / "file").write_text("1")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-m", "one")
    (tmp_path / "untracked").write_text("results")
    clean = source_version(tmp_path)
    assert len(clean["git_commit"]) == 40 and clean["git_dirty"] is False
    (tmp_path / "file").write_text("2")
    assert source_version(tmp_path) == clean | {"git_dirty": True}


def test_a_copy_installed_inside_a_repository_does_not_claim_its_commit(tmp_path):
    git(tmp_path, "init")
    installed = tmp_path / "venv" / "site-packages" / "attn_graph"
    installed.mkdir(parents=True)
    assert source_version(installed) == {}


def test_collect_records_this_machine_and_survives_json(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    one = {min(os.sched_getaffinity(0))}
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, one)
        got = collect(["attn-graph", "bench"], {"bs": [1, 8]}, Device("cpu", reason="none"), tp=2)
    finally:
        os.sched_setaffinity(0, before)
    assert (got.affinity_cores, got.cores, got.tp) == (1, os.cpu_count(), 2)
    assert got.memory_gib == pytest.approx(psutil.virtual_memory().total / 2**30, abs=0.1)
    assert got.python == sys.version.split()[0] and got.torch and got.load_1m is not None
    assert got.visible_devices == "" and got.device == "cpu, no GPU: none"
    assert any("2 ranks share 1" in warning for warning in got.warnings)
    assert Environment(**json.loads(json.dumps(asdict(got)))) == got


def test_two_runs_differ_by_cores_affinity_and_load():
    assert differences(QUIET, QUIET) == []
    other = replace(QUIET, affinity_cores=2, load_1m=9.0, gpus=[GPU | {"name": "NVIDIA L4"}])
    assert [check.name for check in differences(QUIET, other)] == ["affinity_cores", "GPUs", "load"]
    assert "16 in the baseline, 2 in the candidate" in str(differences(QUIET, other)[0])
    assert differences(QUIET, replace(QUIET, load_1m=1.0, hostname="x", git_commit="y")) == []


class FakeNvml:
    """As much of pynvml as one report asks for; clocks and persistence are not supported on this GPU."""

    class NVMLError(Exception):
        pass

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    nvmlClocksThrottleReasonSwPowerCap = 4
    nvmlClocksThrottleReasonHwSlowdown = 8
    nvmlClocksThrottleReasonSwThermalSlowdown = 0x20
    nvmlClocksThrottleReasonHwThermalSlowdown = 0x40
    nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 0x80

    def __init__(self, pids):
        self.pids = pids

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(total=140 * 2**30)

    def nvmlDeviceGetClockInfo(self, handle, kind):
        raise self.NVMLError("not supported")

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return 0x1 | 0x4 | 0x40  # idle, power cap, hardware thermal

    def nvmlDeviceGetPowerUsage(self, handle):
        return 71500

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return [SimpleNamespace(pid=pid, usedGpuMemory=3 * 2**20) for pid in self.pids]


def test_a_gpu_report_leaves_blank_what_the_gpu_does_not_say_and_names_other_processes():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        nvml = FakeNvml([os.getpid(), child.pid, os.getppid(), 2**30])
        report = gpu_report(nvml, GpuRecord(0, "NVIDIA H200", "GPU-1", (0, 0x1B, 0)))
    finally:
        child.communicate()
    assert report["sm_clock_mhz"] is None and report["persistence"] is None
    assert (report["memory_gib"], report["power_w"], report["pci"]) == (140.0, 71.5, "00000000:1b:00")
    assert report["throttle_reasons"] == ["power cap", "thermal (hardware)"]
    parent = psutil.Process(os.getppid()).name()
    assert report["other_processes"] == [
        {"pid": os.getppid(), "name": parent, "memory_mib": 3},
        {"pid": 2**30, "name": "", "memory_mib": 3},
    ]


def test_throttling_unknown_is_not_throttling_absent():
    assert throttle_reasons(FakeNvml([]), None) is None
    assert throttle_reasons(FakeNvml([]), 0x1) == []


def test_every_nvml_name_we_use_exists():
    pynvml = pytest.importorskip("pynvml")
    names = [name for name in vars(FakeNvml) if name.lower().startswith("nvml")]
    assert not [name for name in names if not hasattr(pynvml, name)]
    assert not [name for name in environment.THROTTLES if not hasattr(pynvml, name)]


@pytest.mark.gpu
def test_a_real_gpu_reports_clocks_and_that_it_is_in_use():
    from attn_graph.profilers.devices import resolve

    pytest.importorskip("pynvml")
    got = collect(["x"], {}, resolve("cuda:0"))
    mine = next(gpu for gpu in got.gpus if gpu["cuda_index"] == 0)
    assert mine["sm_clock_mhz"] > 0 and mine["throttle_reasons"] is not None and got.driver
