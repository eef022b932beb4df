"""`--device` against every form of CUDA_VISIBLE_DEVICES, with made-up machines."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from attn_graph.profilers import devices
from attn_graph.profilers.devices import (
    CudaRecord,
    DeviceError,
    GpuRecord,
    Runtime,
    Visible,
    parse_request,
    physical_gpu,
    resolve,
    visible_gpus,
    why_hidden,
)

MIGS = ("MIG-c0ffee00-1111-5222-8333-444444444444", "MIG-c0de0000-1111-5222-8333-444444444444")
GPUS = tuple(
    GpuRecord(i, f"NVIDIA H200 #{i}", f"GPU-{digit * 8}-aaaa-bbbb-cccc-dddddddddddd", (0, 0x1B + i, 0))
    for i, digit in enumerate("0123")
)
WITH_MIG = (*GPUS[:3], GpuRecord(3, "NVIDIA H200 #3", GPUS[3].uuid, GPUS[3].pci, MIGS))
ALL = [0, 1, 2, 3]


def runtime_for(mask: str | None, gpus=GPUS, *, tells_uuid=True, tells_pci=True) -> Runtime:
    """What CUDA would report under this mask; MIG instances appear under their parent's UUID and address."""
    shown = visible_gpus(mask, gpus)
    return Runtime(
        tuple(
            CudaRecord(
                i,
                entry.gpu.name,
                entry.gpu.uuid.removeprefix("GPU-") if tells_uuid else "",
                entry.gpu.pci if tells_pci else None,
            )
            for i, entry in enumerate(shown)
        ),
        "" if shown else "No CUDA GPUs are available",
    )


def resolved(request, mask, gpus=GPUS, **telling):
    variables = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    return resolve(request, variables, lambda: runtime_for(mask, gpus, **telling), lambda: gpus)


@pytest.mark.parametrize(
    ("mask", "physical"),
    [
        (None, ALL),
        ("", []),
        (" ", []),
        ("3,1", [3, 1]),
        (" 3 , 1 ", [3, 1]),
        ("-1", []),
        ("2,-1,0", [2]),
        ("0,9,1", [0]),
        ("1x,2y", [1, 2]),
        ("none", []),
        (",", []),
        ("2,", [2]),
        ("1,1", []),
        (GPUS[2].uuid, [2]),
        ("GPU-2", [2]),
        ("gpu-2", []),
        ("GPU-222", [2]),
        ("GPU-3333,GPU-11", [3, 1]),
        ("GPU-", []),
        ("GPU-9", []),
        (f"{GPUS[1].uuid},0", [1, 0]),
        (GPUS[2].uuid.upper().replace("GPU", "GPU"), [2]),
        (MIGS[0], []),
    ],
)
def test_the_mask_is_read_as_the_driver_reads_it(mask, physical):
    assert [entry.gpu.index for entry in visible_gpus(mask, GPUS)] == physical


@pytest.mark.parametrize(
    ("mask", "wanted"),
    [
        (MIGS[0], [Visible(WITH_MIG[3], MIGS[0])]),
        ("MIG-c0de", [Visible(WITH_MIG[3], MIGS[1])]),
        ("MIG-c0", []),  # both begin so
        (f"MIG-{GPUS[3].uuid}/1/0", [Visible(WITH_MIG[3], f"MIG-{GPUS[3].uuid}/1/0")]),
        ("MIG-GPU-dead/1/0", []),
        ("0,MIG-c0ff", [Visible(WITH_MIG[0]), Visible(WITH_MIG[3], MIGS[0])]),
    ],
)
def test_mig_instances_are_found_by_uuid_prefix_and_in_the_old_spelling(mask, wanted):
    assert list(visible_gpus(mask, WITH_MIG)) == wanted


@pytest.mark.parametrize("request_text", ["1", "cuda:1"])
@pytest.mark.parametrize("mask", ["3,1", "GPU-3,GPU-1", f"{GPUS[3].uuid},{GPUS[1].uuid}"])
def test_device_1_of_3_and_1_is_physical_1(request_text, mask):
    device = resolved(request_text, mask)
    assert (str(device), device.physical_index, device.uuid) == ("cuda:1", 1, GPUS[1].uuid)
    assert "NVIDIA H200 #1, GPU 1 (GPU-1111" in device.title


def test_a_cuda_order_unlike_nvmls_still_names_the_right_gpu():
    fastest_first = Runtime(tuple(CudaRecord(i, GPUS[p].name, GPUS[p].uuid) for i, p in enumerate((2, 0, 1, 3))))
    device = resolve("cuda:0", {}, lambda: fastest_first, lambda: GPUS)
    assert device.physical_index == 2


@pytest.mark.parametrize(
    "telling", [{"tells_uuid": False}, {"tells_pci": False}, {"tells_uuid": False, "tells_pci": False}]
)
def test_uuid_address_or_place_is_enough(telling):
    assert resolved("cuda:0", "3,1", **telling).physical_index == 3


def test_a_gpu_that_nvml_does_not_list_is_named_by_the_runtime_and_not_guessed():
    record = CudaRecord(0, "NVIDIA L4", "feedbeef", (0, 0x99, 0))
    assert physical_gpu(record, GPUS, visible_gpus(None, GPUS)) is None
    device = resolve("cuda", {}, lambda: Runtime((record,)), lambda: GPUS)
    assert (device.name, device.physical_index) == ("NVIDIA L4", None)


def test_without_nvml_the_runtime_names_the_device():
    record = CudaRecord(0, "AMD Instinct MI300X")
    device = resolve("auto", {}, lambda: Runtime((record,)), lambda: ())
    assert (str(device), device.title) == ("cuda:0", "cuda:0, AMD Instinct MI300X")


@pytest.mark.parametrize("mask", [MIGS[1], "MIG-c0de"])
def test_a_mig_instance_is_named_with_its_gpu(mask):
    device = resolved("cuda", mask, WITH_MIG)
    assert (device.uuid, device.physical_index, device.name) == (MIGS[1], 3, "NVIDIA H200 #3")


def test_a_runtime_that_reports_the_mig_uuid_itself_needs_no_mask():
    record = CudaRecord(0, "NVIDIA H200 MIG 1g.18gb", MIGS[0].removeprefix("MIG-"))
    assert resolve("cuda", {}, lambda: Runtime((record,)), lambda: WITH_MIG).uuid == MIGS[0]


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        ("", "CUDA_VISIBLE_DEVICES is empty"),
        ("-1", "starts with '-1', which names none of: 0 GPU-0000"),
        ("GPU-9", "starts with 'GPU-9'"),
        ("MIG-77", "starts with 'MIG-77'"),
        ("1,1", "names one device twice"),
    ],
)
def test_a_mask_that_hides_all_is_the_reason_given(mask, reason):
    assert reason in why_hidden(mask, GPUS)
    device = resolved("auto", mask)
    assert (device.kind, str(device)) == ("cpu", "cpu") and reason in device.title
    with pytest.raises(DeviceError, match="no GPU: CUDA_VISIBLE_DEVICES"):
        resolved("cuda", mask)


@pytest.mark.parametrize("mask", [None, "0", "3,1", GPUS[0].uuid])
def test_a_mask_that_shows_a_gpu_is_no_reason(mask):
    assert why_hidden(mask, GPUS) == ""


def test_a_broken_driver_means_cpu_with_the_drivers_own_words():
    broken = Runtime(reason="Found no NVIDIA driver on your system")
    device = resolve("auto", {}, lambda: broken, lambda: ())
    assert (device.kind, device.reason) == ("cpu", "Found no NVIDIA driver on your system")


def test_cpu_asks_nobody():
    def unwanted():
        raise AssertionError("asked")

    assert resolve("cpu", {}, unwanted, unwanted).title == "cpu"


def test_an_index_past_the_last_visible_gpu_is_refused_with_those_there_are():
    with pytest.raises(DeviceError, match=r"cuda:2: no such GPU under CUDA_VISIBLE_DEVICES=3,1\. Visible: cuda:0 .*#3"):
        resolved("cuda:2", "3,1")


@pytest.mark.parametrize("text", ["gpu", "cuda:", "cuda:x", "cuda:-1", "", "0,1", "GPU-3333", "hip:0"])
def test_what_is_no_device_is_refused_by_name(text):
    with pytest.raises(DeviceError, match="Known: auto, cpu, cuda, cuda:N"):
        parse_request(text)


# The two functions that do ask, against stand-ins for the libraries.


class FakeNvml:
    """As much of pynvml as `nvml_gpus` uses: one MIG GPU, one that has fallen off the bus, one plain and old."""

    class NVMLError(Exception):
        pass

    def nvmlDeviceGetCount(self):
        return 3

    def nvmlDeviceGetHandleByIndex(self, index):
        if index == 1:
            raise self.NVMLError("GPU is lost")
        return index

    def nvmlDeviceGetPciInfo(self, handle):
        return SimpleNamespace(domain=0, bus=0x1B + handle, device=0)

    def nvmlDeviceGetName(self, handle):
        return b"NVIDIA H200"

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-{handle}" if isinstance(handle, int) else handle

    def nvmlDeviceGetMigMode(self, handle):
        if handle == 2:
            raise self.NVMLError("not supported")
        return 1, 1

    def nvmlDeviceGetMaxMigDeviceCount(self, handle):
        return 3

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, slot):
        if slot == 1:
            raise self.NVMLError("not found")
        return f"MIG-{slot}"


def test_nvml_records_keep_their_index_when_a_gpu_is_lost(monkeypatch):
    class Session:
        def __enter__(self):
            return FakeNvml()

        def __exit__(self, *_):
            return None

    monkeypatch.setattr(devices, "nvml_session", Session)
    assert devices.nvml_gpus() == (
        GpuRecord(0, "NVIDIA H200", "GPU-0", (0, 0x1B, 0), ("MIG-0", "MIG-2")),
        GpuRecord(2, "NVIDIA H200", "GPU-2", (0, 0x1D, 0)),
    )


def test_cpu_only_torch_and_a_raising_driver_give_a_reason(monkeypatch):
    import torch

    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None, raising=False)
    assert "built for the CPU only" in devices.torch_runtime().reason

    def broken():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease update")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", broken)
    assert devices.torch_runtime() == Runtime(
        reason="The NVIDIA driver on your system is too old (found version 11040)"
    )


@pytest.mark.gpu
def test_the_real_runtime_and_nvml_agree_on_the_first_gpu():
    import torch

    device = resolve("cuda:0")
    assert device.name and torch.cuda.get_device_name(0).startswith(device.name.split(" MIG")[0])
    assert device.physical_index is not None and device.uuid.startswith(("GPU-", "MIG-"))
