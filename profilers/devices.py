"""Which device `--device` means, and which physical GPU stands behind a CUDA index.

CUDA renumbers: CUDA_VISIBLE_DEVICES may hold indices, UUIDs, their prefixes or MIG ids, and the management library
(NVML) counts physical GPUs in its own order. So a CUDA index is matched to an NVML record by UUID, then by PCI address,
and by its place in the variable only where the runtime gives neither.

What CUDA and NVML say is passed in as plain records, so everything but `torch_runtime` and `nvml_gpus` runs anywhere.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType


class DeviceError(ValueError):
    """A device that was asked for and is not there; says what is."""


@dataclass(frozen=True, slots=True)
class GpuRecord:
    """One physical GPU as NVML sees it.

    Attributes:
        index: NVML index, as `nvidia-smi` shows it.
        uuid: ``GPU-...``.
        pci: domain, bus, device.
        mig_uuids: ``MIG-...`` of its instances; empty without MIG.
    """

    index: int
    name: str
    uuid: str
    pci: tuple[int, int, int]
    mig_uuids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CudaRecord:
    """One device as the CUDA or HIP runtime of this process numbers it. `uuid` and `pci` where it tells them."""

    index: int
    name: str
    uuid: str = ""
    pci: tuple[int, int, int] | None = None


@dataclass(frozen=True, slots=True)
class Runtime:
    """Devices that PyTorch can use, or the reason why there are none."""

    devices: tuple[CudaRecord, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Visible:
    """One entry of CUDA_VISIBLE_DEVICES: a GPU, and the MIG instance on it if one was named."""

    gpu: GpuRecord
    mig_uuid: str = ""


@dataclass(frozen=True, slots=True)
class Device:
    """The device to use.

    Attributes:
        kind: ``cuda`` (HIP included) or ``cpu``.
        index: CUDA index in this process, -1 for the CPU.
        name: the physical device's name.
        uuid: of the GPU or MIG instance; blank where unknown.
        physical_index: NVML index, or None where unknown.
        reason: why the CPU was taken although a GPU was not ruled out.
    """

    kind: str
    index: int = -1
    name: str = ""
    uuid: str = ""
    physical_index: int | None = None
    reason: str = ""

    def __str__(self) -> str:
        """As torch spells it: ``cuda:1`` or ``cpu``."""
        return f"{self.kind}:{self.index}" if self.kind == "cuda" else self.kind

    @property
    def is_cuda(self) -> bool:
        return self.kind == "cuda"

    @property
    def title(self) -> str:
        """For people: ``cuda:1, NVIDIA H200, GPU 1 (GPU-5f0c...)`` or ``cpu, no GPU: ...``."""
        parts = [str(self)]
        if self.name:
            parts.append(self.name)
        if self.physical_index is not None:
            parts.append(f"GPU {self.physical_index} ({self.uuid})")
        elif self.uuid:
            parts.append(self.uuid)
        if self.reason:
            parts.append(f"no GPU: {self.reason}")
        return ", ".join(parts)


def resolve(
    request: str = "auto",
    variables: Mapping[str, str] | None = None,
    runtime: Callable[[], Runtime] | None = None,
    nvml: Callable[[], Sequence[GpuRecord]] | None = None,
) -> Device:
    """The device that `request` means.

    Args:
        request: ``auto``, ``cpu``, ``cuda``, ``cuda:N`` or ``N``. N counts what CUDA_VISIBLE_DEVICES leaves visible.
        variables: the environment; os.environ by default.
        runtime: what PyTorch can use; `torch_runtime` by default. Not called for ``cpu``.
        nvml: the physical GPUs; `nvml_gpus` by default. Not called for ``cpu``.

    Raises:
        DeviceError: no such request, or ``cuda`` where there is no GPU to use.
    """
    variables = os.environ if variables is None else variables
    kind, index = parse_request(request)
    if kind == "cpu":
        return Device("cpu")
    found, gpus = (runtime or torch_runtime)(), (nvml or nvml_gpus)()
    mask = variables.get("CUDA_VISIBLE_DEVICES")
    if not found.devices:
        reason = why_hidden(mask, gpus) or found.reason or f"PyTorch sees none{_under(mask)}"
        if kind == "auto":
            return Device("cpu", reason=reason)
        raise DeviceError(f"--device {request}: no GPU: {reason}. Use --device cpu or auto")
    index = index or 0
    if index >= len(found.devices):
        known = ", ".join(f"cuda:{d.index} {d.name}" for d in found.devices)
        raise DeviceError(f"--device {request}: no such GPU{_under(mask)}. Visible: {known}")
    record = found.devices[index]
    physical = physical_gpu(record, gpus, visible_gpus(mask, gpus))
    if physical is None:
        return Device("cuda", index, record.name, record.uuid)
    return Device("cuda", index, record.name, physical.mig_uuid or physical.gpu.uuid, physical.gpu.index)


def use_interpreter(device: Device) -> None:
    """Have Triton interpret kernels, in this process and those it starts, where there is no GPU to compile for.

    Before anything imports Triton: it looks once. Launches, values and counts of interpreted kernels are real; their
    times are not, and are not reported.
    """
    if not device.is_cuda:
        os.environ["TRITON_INTERPRET"] = "1"


def _under(mask: str | None) -> str:
    return "" if mask is None else f" under CUDA_VISIBLE_DEVICES={mask}"


def parse_request(request: str) -> tuple[str, int | None]:
    """``cuda:1`` -> ("cuda", 1). Asks nobody whether that device exists.

    Raises:
        DeviceError: with what is understood.
    """
    match = re.fullmatch(r"(auto|cpu|cuda)|(?:cuda:)?(\d+)", request.strip())
    if match is None:
        raise DeviceError(f"unknown device {request!r}. Known: auto, cpu, cuda, cuda:N (N counts visible GPUs from 0)")
    return (match[1], None) if match[1] else ("cuda", int(match[2]))


def visible_gpus(mask: str | None, gpus: Sequence[GpuRecord]) -> tuple[Visible, ...]:
    """What the driver shows for a value of CUDA_VISIBLE_DEVICES, in its order.

    The driver's rules: unset shows all; the list ends at the first entry that names nothing; a UUID may be shortened
    while it stays unique; naming one device twice hides every device.
    """
    if mask is None:
        return tuple(map(Visible, gpus))
    shown: list[Visible] = []
    for entry in mask.split(","):
        named = _named(entry.strip(), gpus)
        if named is None:
            break
        if named in shown:
            return ()
        shown.append(named)
    return tuple(shown)


def why_hidden(mask: str | None, gpus: Sequence[GpuRecord]) -> str:
    """Why CUDA_VISIBLE_DEVICES hides every GPU; blank if it does not, or if there is none to hide."""
    if mask is None:
        return ""
    if not mask.strip():
        return "CUDA_VISIBLE_DEVICES is empty"
    if not gpus or visible_gpus(mask, gpus):
        return ""
    first = mask.split(",")[0].strip()
    if _named(first, gpus) is not None:
        return f"CUDA_VISIBLE_DEVICES={mask} names one device twice, which hides all"
    known = ", ".join(f"{gpu.index} {gpu.uuid}" for gpu in gpus)
    return f"CUDA_VISIBLE_DEVICES={mask} starts with {first!r}, which names none of: {known}"


def _named(entry: str, gpus: Sequence[GpuRecord]) -> Visible | None:
    """The device that one entry names, or None. An ambiguous prefix names nothing."""
    if entry.startswith("MIG-GPU-"):  # before driver 470: MIG-GPU-<uuid>/<gpu instance>/<compute instance>
        parent = entry.removeprefix("MIG-").split("/")[0]
        return next((Visible(gpu, entry) for gpu in gpus if gpu.uuid == parent), None)
    if entry.startswith("MIG-"):
        found = [Visible(gpu, mig) for gpu in gpus for mig in gpu.mig_uuids if _abbreviates(entry, mig)]
    elif entry.startswith("GPU-"):
        found = [Visible(gpu) for gpu in gpus if _abbreviates(entry, gpu.uuid)]
    else:
        # Read as C's strtol does: "1x" is 1, and "-1", the usual way to hide everything, names nothing.
        digits = re.match(r"\d+", entry)
        found = [Visible(gpu) for gpu in gpus if digits and gpu.index == int(digits[0])]
    return found[0] if len(found) == 1 else None


def _abbreviates(prefix: str, uuid: str) -> bool:
    return uuid.lower().startswith(prefix.lower())


def physical_gpu(record: CudaRecord, gpus: Sequence[GpuRecord], shown: Sequence[Visible] = ()) -> Visible | None:
    """The NVML record behind a CUDA index: by UUID, by PCI address, or by its place among `shown`."""
    wanted = _bare(record.uuid)
    if wanted:
        for gpu in gpus:
            if _bare(gpu.uuid) == wanted:
                return _with_mig(gpu, record, shown)
            for mig in gpu.mig_uuids:
                if _bare(mig) == wanted:
                    return Visible(gpu, mig)
    if record.pci is not None:
        for gpu in gpus:
            if gpu.pci == record.pci:
                return _with_mig(gpu, record, shown)
    if not wanted and record.pci is None and record.index < len(shown):
        return shown[record.index]
    return None


def _with_mig(gpu: GpuRecord, record: CudaRecord, shown: Sequence[Visible]) -> Visible:
    """CUDA reports a MIG instance under its parent's UUID and address; the variable then says which instance."""
    entry = shown[record.index] if record.index < len(shown) else None
    return entry if entry is not None and entry.gpu == gpu else Visible(gpu)


def _bare(uuid: str) -> str:
    return re.sub(r"^(GPU|MIG)-", "", uuid, flags=re.IGNORECASE).lower()


# What CUDA and NVML say.


def torch_runtime() -> Runtime:
    """Devices that this PyTorch can use. Imports torch and initialises CUDA, so later child processes must not fork."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library of torch is missing
        return Runtime(reason=f"PyTorch does not load ({_first_line(error)})")
    if torch.version.cuda is None and torch.version.hip is None:
        return Runtime(reason=f"this PyTorch ({torch.__version__}) is built for the CPU only")
    try:
        torch.cuda.init()
        count = torch.cuda.device_count()
        return Runtime(tuple(_cuda_record(i, torch.cuda.get_device_properties(i)) for i in range(count)))
    except Exception as error:  # a broken driver raises half a dozen types; each means: no GPU here
        return Runtime(reason=_first_line(error))


def _cuda_record(index: int, properties: object) -> CudaRecord:
    pci = tuple(getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    uuid = str(getattr(properties, "uuid", ""))
    return CudaRecord(index, properties.name, uuid, None if None in pci else pci)


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")


@contextmanager
def nvml_session() -> Iterator[ModuleType | None]:
    """`pynvml`, initialised; None where the package, the library or the driver is missing or broken."""
    try:
        import pynvml
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def nvml_gpus() -> tuple[GpuRecord, ...]:
    """Every physical GPU that NVML lists; empty where NVML is not to be had."""
    with nvml_session() as nvml:
        if nvml is None:
            return ()
        handles = enumerate(_handles(nvml))
        return tuple(_gpu_record(nvml, index, handle) for index, handle in handles if handle is not None)


def _handles(nvml: ModuleType) -> list[object | None]:
    """Handles by NVML index; None for a GPU that has fallen off the bus or that we may not open."""
    handles = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handles.append(nvml.nvmlDeviceGetHandleByIndex(index))
        except nvml.NVMLError:
            handles.append(None)
    return handles


def _gpu_record(nvml: ModuleType, index: int, handle: object) -> GpuRecord:
    address = nvml.nvmlDeviceGetPciInfo(handle)
    return GpuRecord(
        index=index,
        name=text(nvml.nvmlDeviceGetName(handle)),
        uuid=text(nvml.nvmlDeviceGetUUID(handle)),
        pci=(address.domain, address.bus, address.device),
        mig_uuids=tuple(_mig_uuids(nvml, handle)),
    )


def _mig_uuids(nvml: ModuleType, handle: object) -> Iterator[str]:
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
        slots = nvml.nvmlDeviceGetMaxMigDeviceCount(handle) if current else 0
    except nvml.NVMLError:  # not a GPU with MIG
        return
    for slot in range(slots):
        try:
            yield text(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)))
        except nvml.NVMLError:  # an empty slot
            continue


def text(value: str | bytes) -> str:
    """NVML strings, which older bindings return as bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value
