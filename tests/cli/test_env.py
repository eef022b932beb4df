"""`attn-graph env` on whatever machine runs the tests, and with what may spoil a measurement switched on."""

from __future__ import annotations

import json
import platform

import pytest
import torch

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def test_json_is_one_document_with_machine_checks_and_the_cost_of_a_range(cli):
    code, out, err = cli("env", "--json", env=NO_GPU)
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["torch"] == torch.__version__ and document["python"] == platform.python_version()
    assert document["cores"] >= document["affinity_cores"] >= 1
    assert document["visible_devices"] == "" and document["device"].startswith("cpu, no GPU: CUDA_VISIBLE_DEVICES")
    assert 1 < document["nvtx_range_ns"] < 100_000 and document["nvtx_state"] == "idle"
    assert [check["level"] for check in document["checks"] if check["name"] == "device"] == ["info"]


def test_table_names_processor_versions_and_findings(cli):
    code, out, _ = cli("env", env=NO_GPU | {"NVTX_INJECTION64_PATH": "/opt/[x]/lib.so"})
    assert code == 0
    assert torch.__version__ in out and "NVTX range" in out and "usable of" in out
    assert "warning: NVTX_INJECTION64_PATH: set to /opt/[x]/lib.so" in out


@pytest.mark.parametrize(
    ("variables", "code"),
    [({}, 0), ({"NVTX_INJECTION64_PATH": "/x.so"}, 0), ({"CUDA_LAUNCH_BLOCKING": "1"}, 1)],
)
def test_check_exits_1_only_for_an_error(cli, variables, code):
    ended = cli("env", "--check", env=NO_GPU | {"CUDA_LAUNCH_BLOCKING": None} | variables)
    assert ended.code == code
    assert all(name in ended.out for name in variables)


def test_without_check_an_error_is_listed_and_the_command_succeeds(cli):
    code, out, _ = cli("env", env=NO_GPU | {"CUDA_LAUNCH_BLOCKING": "1"})
    assert code == 0 and "error: CUDA_LAUNCH_BLOCKING" in out


@pytest.mark.parametrize(
    ("device", "mask"),
    [
        ("cuda", ""),
        ("cuda", "-1"),
        ("cuda", "MIG-c0ffee00-0000-0000-0000-000000000000"),
        ("cuda", "GPU-dead"),
        ("cuda:0", "99,98"),
    ],
)
def test_a_gpu_that_is_not_there_is_one_line_and_exit_2(cli, device, mask):
    code, out, err = cli("env", "--device", device, env={"CUDA_VISIBLE_DEVICES": mask})
    assert (code, out) == (2, "")
    assert err.startswith(f"Error: --device {device}: no GPU: ") and err.count("\n") == 1


def test_what_is_no_device_exits_2_and_lists_what_is(cli):
    code, _, err = cli("env", "--device", "gpu")
    assert code == 2 and "unknown device 'gpu'" in err and "auto, cpu, cuda, cuda:N" in err
