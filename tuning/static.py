"""What a candidate needs of a GPU, from compiling it: registers, spills, shared memory. Works without that GPU.

Triton asks its active driver for the target only, so a driver that names a target is enough to compile for it. The
launch itself comes from the backend, on tensors without storage, so what is compiled is what a bench would compile.
Runs in a child process, since Triton's interpreter, once chosen, replaces the compiler for good.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from queue import PriorityQueue, SimpleQueue
from typing import TYPE_CHECKING, Any

from ..profilers.sample import Case
from .child import Child, ChildDied, ChildTimeout
from .outcome import SKIPPED, Outcome
from .space import Candidate

if TYPE_CHECKING:
    from ..backends.batch import Pools

COMPILER = "attn_graph.tuning.static:StaticCompiler"
COMPILE_LIMIT_S = 60.0
SPILL_LIMIT_BYTES = 16
"""Up to here a compiler may have spilled by choice, a register or two for more programs at a time."""


class TargetError(ValueError):
    """A target that is not understood; says what is."""


@dataclass(frozen=True, slots=True)
class Target:
    """What to compile for, as Triton names it: ``cuda`` with 90, or ``hip`` with ``gfx942``."""

    backend: str
    arch: int | str
    warp_size: int

    def __str__(self) -> str:
        return f"sm_{self.arch}" if self.backend == "cuda" else str(self.arch)


def parse_target(text: str) -> Target:
    """``sm_90`` or ``gfx942``.

    Raises:
        TargetError: neither.
    """
    if match := re.fullmatch(r"sm_?(\d{2,3})a?", text):
        return Target("cuda", int(match[1]), 32)
    if re.fullmatch(r"gfx\w+", text):
        return Target("hip", text, 64 if text.startswith("gfx9") else 32)
    raise TargetError(f"unknown target {text!r}. Known: sm_NN (sm_80, sm_90, sm_100) and gfxNNN (gfx942)")


def device_target(index: int) -> Target:
    """What to compile for on a GPU of this machine."""
    import torch

    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return Target("hip", properties.gcnArchName.split(":")[0], properties.warp_size)
    return Target("cuda", 10 * properties.major + properties.minor, properties.warp_size)


@dataclass(frozen=True, slots=True)
class Resources:
    """What one program of a compiled kernel takes. None: this toolchain does not say.

    Attributes:
        registers: per lane.
        spill_bytes: per lane, of registers that did not fit.
        shared_bytes: per program.
        code_bytes: of the whole binary.
    """

    registers: int | None
    spill_bytes: int | None
    shared_bytes: int
    code_bytes: int


@dataclass(frozen=True, slots=True)
class Compiled:
    """A candidate for one target; `resources` unless `outcome` says that it does not compile."""

    outcome: Outcome
    resources: Resources | None = None


class Compilers:
    """Compiler processes for one target, `jobs` of them; they start when there is something to compile."""

    def __init__(self, target: Target, jobs: int = 1) -> None:
        self._workers = [_Worker(target) for _ in range(max(1, jobs))]
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(len(self._workers))
        self._waiting: PriorityQueue[tuple] = PriorityQueue()
        self._submitted = count()

    def submit(
        self, case: Case, candidates: Sequence[Candidate], urgency: tuple[int, ...] = ()
    ) -> list[Future[Compiled]]:
        """Compile every candidate of a case; returns at once.

        One that does not compile, crashes the compiler, takes more than COMPILE_LIMIT_S or spills more than
        SPILL_LIMIT_BYTES is out; where the toolchain tells no spills, none is out for that.

        Args:
            urgency: the lower, the sooner, whenever it was submitted; of equals the first.
        """
        futures = []
        for candidate in candidates:
            future: Future[Compiled] = Future()
            self._waiting.put((urgency, next(self._submitted), future, case, candidate))
            self._threads.submit(self._compile_most_urgent)
            futures.append(future)
        return futures

    def survey(self, case: Case, candidates: Sequence[Candidate]) -> Iterator[Compiled]:
        """`submit`, and yield the results in the candidates' order, as they come."""
        for future in self.submit(case, candidates):
            yield future.result()

    def _compile_most_urgent(self) -> None:
        *_, future, case, candidate = self._waiting.get()
        if not future.set_running_or_notify_cancel():
            return
        worker = self._idle.get()
        try:
            future.set_result(worker.compile(case, candidate))
        except BaseException as error:
            future.set_exception(error)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """Drop what has not begun, and end the processes with what they are at."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.kill()
        self._threads.shutdown()
        for worker in self._workers:
            worker.close()

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Worker:
    """A compiler process, replaced when a candidate crashes it."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._child: Child | None = None

    def compile(self, case: Case, candidate: Candidate) -> Compiled:
        try:
            if self._child is None:
                self._child = Child(COMPILER, self._target, variables={"TRITON_INTERPRET": "0"})
            return self._child.call("compile", case, candidate, limit_s=COMPILE_LIMIT_S)
        except ChildTimeout as error:
            self._child = None
            return Compiled(Outcome(candidate, SKIPPED, "hung", f"compiler: {error}"))
        except ChildDied as error:
            self._child = None
            return Compiled(Outcome(candidate, SKIPPED, "died", f"compiler: {error}"))

    def kill(self) -> None:
        if child := self._child:
            child.kill()

    def close(self) -> None:
        if self._child is not None:
            self._child.close()


# In the child.


class StaticCompiler:
    """Compiles the one launch of a case's fused rebuild for a target."""

    def __init__(self, target: Target) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.runtime import driver
        from triton.runtime.jit import JITFunction

        self._target = target
        self._kernels: list[Any] = []
        driver.set_active(_NamedTarget(GPUTarget(target.backend, target.arch, target.warp_size)))
        run = JITFunction.run

        def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            self._kernels.append(run(kernel, *args, grid=grid, warmup=True, **options))

        JITFunction.run = compile_only  # of this process, which does nothing else

    def compile(self, case: Case, candidate: Candidate) -> Compiled:
        from .measure import why

        self._kernels.clear()
        try:
            _rebuild_without_storage(case, candidate)
            (kernel,) = self._kernels
            resources = _resources(kernel, self._target)
        except Exception as error:
            return Compiled(Outcome(candidate, SKIPPED, *why(error)))
        if (resources.spill_bytes or 0) > SPILL_LIMIT_BYTES:
            reason = f"{resources.registers} registers and {resources.spill_bytes} bytes a lane spilled to memory"
            return Compiled(Outcome(candidate, SKIPPED, "spills", reason), resources)
        return Compiled(Outcome(candidate), resources)


class _NamedTarget:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def _rebuild_without_storage(case: Case, candidate: Candidate) -> None:
    """A fused rebuild on meta tensors: shapes, strides and dtypes as in a bench, and no memory."""
    from ..backends.kernels.launch import observed
    from ..backends.modes import Implementation
    from ..backends.registry import lookup
    from ..profilers.measure import attention_config
    from .measure import padding_runner

    config = attention_config(case, candidate.as_dict())
    backend = lookup(case.backend).load()(config, _pools_without_storage(case), Implementation.FUSED)
    runner = padding_runner(case, backend)
    with observed(lambda run, args: run()):  # an observed launch goes through Triton, never past it
        backend.init_forward_metadata_in_graph(runner.capture_batch(case.bucket))


def _pools_without_storage(case: Case) -> Pools:
    from ..backends.base import tensors_of
    from ..backends.batch import Pools
    from ..profilers.measure import case_pools

    small = tensors_of(case_pools(replace(case, bs=1, bucket=1), "cpu"))  # two rows tell the width
    grown = {
        name: tensor.new_empty((case.bucket + 1, *tensor.shape[1:]), device="meta") for name, tensor in small.items()
    }
    return Pools(**grown)


def _resources(kernel: Any, target: Target) -> Resources:
    if target.backend == "hip":
        listing = kernel.asm["amdgcn"]
        registers, spilled = (_number(rf"\.{name}:\s+(\d+)", listing) for name in _HIP_FIELDS)
        binary = kernel.asm["hsaco"]
    else:
        binary = kernel.asm["cubin"]
        listing = _cuda_usage(binary)
        registers, spilled = (_number(rf"\b{name}:(\d+)", listing) for name in _CUDA_FIELDS)
    return Resources(registers, spilled, kernel.metadata.shared, len(binary))


_HIP_FIELDS = ("vgpr_count", "private_segment_fixed_size")
_CUDA_FIELDS = ("REG", "STACK")  # Triton puts nothing but spills on the stack


def _number(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text)
    return int(match[1]) if match else None


def _cuda_usage(cubin: bytes) -> str:
    """What cuobjdump says of a binary, blank where there is no cuobjdump. Triton brings one along."""
    import triton

    bundled = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    tool = str(bundled) if bundled.exists() else shutil.which("cuobjdump")
    if tool is None:
        return ""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        ended = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True)
    return ended.stdout if ended.returncode == 0 else ""
