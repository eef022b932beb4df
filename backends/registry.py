"""Name -> lazy factory. Listing what exists imports neither torch nor any backend.

Third parties add theirs with an entry point in the group ``attn_graph.backends`` whose object is a `BackendInfo`.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

ENTRY_POINT_GROUP = "attn_graph.backends"

DECODE_MODES = ("decode", "idle")
SPEC_MODES = ("draft_decode", "target_verify", "draft_extend", "draft_extend_v2")


COMPARED = "compared"
NO_SIGNATURE = "not run: no signature of it is specified"
PLAN_ON_HOST = "the plan is made of host lengths before every replay; a graph would freeze it"


class UnknownName(LookupError):
    """A name that is not registered; the message lists what is and the nearest match."""


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """What can be said about a backend without importing it.

    Attributes:
        name: registry name, as on the command line.
        kind: ``backend``, ``wrapper`` or ``runner``.
        family: shape of its metadata, e.g. ``page_table`` or ``csr``.
        pattern: ``A`` (bind, then run the replay body), ``B`` (build and refresh share a helper) or ``-``.
        modes: forward modes it serves, by name.
        target: ``module:attribute`` of the class, relative to this package or absolute.
        note: one line: what only its own hardware or vendor package could show, if anything.
        dispatches: ATen dispatches of one classic rebuild by mode (without SWA, with SWA), where specified; of one
            request, where each further one adds some. Of a wrapper, of what it does itself.
        lens: dtype of seq_lens that they are specified for.
        host_work: why fused-graph still works on the host before a launch, by mode or ``*``; empty where it does not.
        planners: vendor functions that a reference stands in for, and whether `verify` compares: ``compared`` where the
            package is installed, else why not.
        compositions: of a wrapper, options of those that stand for all; the counts are the first's.
        options: of a backend, by mode or ``*``, options under which it has other metadata, which `verify` looks at too.
    """

    name: str
    kind: str
    family: str
    pattern: str
    modes: tuple[str, ...]
    target: str
    note: str = ""
    dispatches: dict[str, tuple[int | None, int | None]] = field(default_factory=dict)
    lens: str = "int32"
    host_work: dict[str, str] = field(default_factory=dict)
    planners: dict[str, str] = field(default_factory=dict)
    compositions: tuple[dict[str, str], ...] = ()
    options: dict[str, tuple[dict[str, Any], ...]] = field(default_factory=dict)

    def host_work_in(self, mode: str) -> str:
        """Why fused-graph is not free of host work in a mode; empty where it dispatches, launches and waits for
        nothing."""
        return self.host_work.get(mode) or self.host_work.get("*", "")

    def options_in(self, mode: str) -> tuple[dict[str, Any], ...]:
        """Options under which a mode is looked at besides its own."""
        return self.options.get(mode, self.options.get("*", ()))

    def load(self):
        """Import and return the class."""
        module, _, attribute = self.target.partition(":")
        return getattr(import_module(module, package=__package__), attribute)


BUILTIN: tuple[BackendInfo, ...] = (
    BackendInfo(
        name="trtllm_mha",
        kind="backend",
        family="page_table",
        pattern="A",
        modes=DECODE_MODES + SPEC_MODES,
        target=".trtllm_mha:TrtllmMhaBackend",
        note="metadata only; the XQA and trtllm-gen attention kernels themselves are not run",
        dispatches={
            "decode": (16, 28),
            "idle": (16, 28),
            "draft_decode": (19, 31),
            "target_verify": (18, 30),
            "draft_extend": (21, 33),
            "draft_extend_v2": (20, 32),
        },
    ),
    BackendInfo(
        name="trtllm_mla",
        kind="backend",
        family="block_table",
        pattern="B",
        modes=DECODE_MODES + SPEC_MODES,
        options={"decode": ({"own_seq_lens": True},), "draft_decode": ({"draft_step_offset": True},)},
        target=".trtllm_mla:TrtllmMlaBackend",
        note="metadata only; the trtllm-gen MLA kernel and its ragged draft-extend padding are not run",
        dispatches={
            "decode": (1, None),
            "idle": (1, None),
            "draft_decode": (1, None),
            "target_verify": (4, None),
            "draft_extend": (11, None),
            "draft_extend_v2": (11, None),
        },
    ),
    BackendInfo(
        name="dsa",
        kind="backend",
        family="page_table",
        pattern="B",
        modes=(*DECODE_MODES, "draft_decode", "target_verify", "draft_extend_v2"),
        planners={"deep_gemm.get_paged_mqa_logits_metadata": COMPARED, "the top-k kernel's plan": NO_SIGNATURE},
        target=".dsa:DsaBackend",
        note="reference planners stand in for DeepGEMM's, the top-k kernel's and FlashMLA's; no kernel of theirs runs",
        lens="int64",
        dispatches={
            "decode": (23, None),
            "idle": (23, None),
            "draft_decode": (23, None),
            "target_verify": (35, None),
            "draft_extend_v2": (35, None),
        },
    ),
    BackendInfo(
        name="cutlass_mla",
        kind="backend",
        family="block_table",
        pattern="A",
        modes=DECODE_MODES,
        target=".cutlass_mla:CutlassMlaBackend",
        note="metadata only; the CUTLASS MLA kernel (Blackwell) and its workspace are not here",
        dispatches={"decode": (2, None), "idle": (2, None)},
    ),
    BackendInfo(
        name="flashmla",
        kind="backend",
        family="block_table",
        pattern="A",
        modes=(*DECODE_MODES, "draft_decode", "target_verify", "draft_extend_v2"),
        planners={"sgl_kernel.flash_mla.get_mla_metadata": COMPARED},
        options={"*": ({"fp8": True, "num_sms": 8}, {"older_plan": True, "num_sms": 8})},
        target=".flashmla:FlashMlaBackend",
        note="a reference scheduler stands in for get_mla_metadata, its launch counted apart",
        dispatches={
            "decode": (12, None),
            "idle": (12, None),
            "draft_decode": (12, None),
            "target_verify": (14, None),
            "draft_extend_v2": (15, None),
        },
    ),
    BackendInfo(
        name="triton",
        kind="backend",
        family="csr",
        pattern="B",
        modes=(*DECODE_MODES, "target_verify", "draft_extend", "draft_extend_v2"),
        options={
            "decode": ({"deterministic": True, "split_tile_size": 16}, {"static_kv_splits": True}, {"use_mla": True}),
        },
        target=".triton:TritonBackend",
        note="metadata only; draft decode is the multi_step_draft wrapper's",
        dispatches={
            "decode": (8, 30),
            "idle": (8, 30),
            "target_verify": (13, 36),
            "draft_extend": (8, None),
            "draft_extend_v2": (11, None),
        },
    ),
    BackendInfo(
        name="flashinfer",
        kind="backend",
        family="csr",
        pattern="B",
        modes=(*DECODE_MODES, "target_verify", "draft_extend", "draft_extend_v2", "dllm_extend"),
        host_work={"*": PLAN_ON_HOST},
        planners={"flashinfer's plan": NO_SIGNATURE},
        target=".flashinfer:FlashInferBackend",
        note="a reference planner stands in for FlashInfer's, its work stays on the host; counts hold its copies",
        dispatches={
            "decode": (15, 44),
            "idle": (15, 44),
            "target_verify": (15, None),
            "draft_extend": (17, None),
            "draft_extend_v2": (14, None),
        },
    ),
    BackendInfo(
        name="flashinfer_mla",
        kind="backend",
        family="csr",
        pattern="B",
        modes=(*DECODE_MODES, "target_verify", "draft_extend"),
        host_work={"*": PLAN_ON_HOST},
        planners={"flashinfer's plan": NO_SIGNATURE},
        target=".flashinfer_mla:FlashInferMlaBackend",
        note="a reference planner stands in for FlashInfer's, its work stays on the host; counts hold its copies",
        dispatches={
            "decode": (13, None),
            "idle": (13, None),
            "target_verify": (17, None),
            "draft_extend": (19, None),
        },
    ),
    BackendInfo(
        name="aiter",
        kind="backend",
        family="csr",
        pattern="A",
        modes=(*DECODE_MODES, "target_verify", "draft_extend", "draft_extend_v2"),
        planners={"aiter.get_mla_metadata_v1": NO_SIGNATURE},
        options={"*": ({"mla": True, "fp8": True, "num_sms": 8}, {"unified": True})},
        target=".aiter:AiterBackend",
        note="metadata logic on the device at hand; reference schedulers stand in for AITER's, no kernel of it runs",
        dispatches={
            "decode": (6, 26),
            "idle": (6, 26),
            "target_verify": (16, 22),
            "draft_extend": (13, 19),
            "draft_extend_v2": (13, 19),
        },
    ),
    BackendInfo(
        name="ascend",
        kind="backend",
        family="page_table",
        pattern="A",
        modes=(*DECODE_MODES, *SPEC_MODES, "dllm_extend"),
        target=".ascend:AscendBackend",
        note="metadata logic on the device at hand; the NPU's host-list update beside the replay is not run",
        dispatches={
            "decode": (17, 34),
            "idle": (17, 34),
            "draft_decode": (18, 35),
            "target_verify": (18, 35),
            "draft_extend": (17, 34),
            "draft_extend_v2": (17, 34),
            "dllm_extend": (17, 34),
        },
    ),
    BackendInfo(
        name="ascend_gdn",
        kind="backend",
        family="linear_state",
        pattern="A",
        modes=(*DECODE_MODES, "target_verify"),
        target=".ascend_gdn:AscendGdnBackend",
        note="metadata logic on the device at hand, counts without padding (31 and 49 with); no NPU kernel is run",
        dispatches={"decode": (21, None), "idle": (29, None), "target_verify": (38, None)},
    ),
    BackendInfo(
        name="mamba",
        kind="backend",
        family="linear_state",
        pattern="A",
        modes=(*DECODE_MODES, "target_verify"),
        options={
            "decode": ({"variant": "gdn", "ring_interval": 3}, {"variant": "kda", "ring_interval": 3}),
            "idle": ({"variant": "gdn", "ring_interval": 3},),
            "target_verify": (
                {"variant": "gdn", "ring_interval": 3},
                {"variant": "mamba2", "ring_interval": 3, "ring_in_verify": True},
            ),
        },
        target=".mamba:MambaBackend",
        note="metadata only, counts where the engine says how many rows are padding; no state kernel is run",
        dispatches={"decode": (11, None), "idle": (12, None), "target_verify": (11, None)},
    ),
    BackendInfo(
        name="lightning",
        kind="backend",
        family="linear_state",
        pattern="A",
        modes=(*DECODE_MODES, "target_verify"),
        target=".lightning:LightningBackend",
        note="metadata only, counts where the engine says how many rows are padding; no trees, as upstream",
        dispatches={"decode": (15, None), "idle": (16, None), "target_verify": (15, None)},
    ),
    BackendInfo(
        name="deepseek_v4",
        kind="backend",
        family="compressed",
        pattern="B",
        modes=DECODE_MODES + SPEC_MODES,
        planners={
            "deep_gemm.get_paged_mqa_logits_metadata": COMPARED,
            "FlashMLA's sparse schedules": NO_SIGNATURE,
            "the compressors' plans": NO_SIGNATURE,
        },
        target=".deepseek_v4:DeepseekV4Backend",
        note="needs pages of 256 tokens and a sliding-window pool; FlashMLA's, DeepGEMM's and the compressors' own "
        "planners are reference schedulers here; verify and draft extend dispatch 4 more per further request",
        lens="int64",
        dispatches={
            "decode": (None, 65),
            "idle": (None, 69),
            "draft_decode": (None, 65),
            "target_verify": (None, 81),
            "draft_extend": (None, 38),
            "draft_extend_v2": (None, 38),
        },
    ),
    BackendInfo(
        name="flashattention",
        kind="backend",
        family="page_table",
        pattern="A",
        modes=DECODE_MODES + SPEC_MODES,
        planners={"FA3's get_scheduler_metadata": "not run: what it must hold is not specified"},
        options={"decode": ({"local_chunk": 48},)},
        target=".flashattention:FlashAttentionBackend",
        note="metadata only; FA3's own tile scheduler, a library call on the host, is not run",
        dispatches={
            "decode": (7, 10),
            "idle": (7, 10),
            "draft_decode": (7, 10),
            "target_verify": (16, 25),
            "draft_extend": (19, 28),
            "draft_extend_v2": (18, 27),
        },
    ),
    BackendInfo(
        name="dual_chunk",
        kind="backend",
        family="page_table",
        pattern="A",
        modes=DECODE_MODES,
        target=".dual_chunk:DualChunkBackend",
        note="metadata only; counts are those of one request: each further one adds 20, or 42 past the first chunk, "
        "and a GPU 2 for lists that are read back",
        dispatches={"decode": (55, None), "idle": (55, None)},
    ),
    BackendInfo(
        name="wave",
        kind="backend",
        family="csr",
        pattern="A",
        modes=(*DECODE_MODES, "target_verify"),
        options={"decode": ({"static_kv_splits": True},)},
        target=".wave:WaveBackend",
        note="metadata only, no Wave kernel is run; verify counts are without a tree mask, which adds 2",
        dispatches={"decode": (9, None), "idle": (9, None), "target_verify": (13, None)},
    ),
    BackendInfo(
        name="multi_step_draft",
        kind="wrapper",
        family="steps",
        pattern="-",
        modes=("draft_decode",),
        host_work={"*": "over flashinfer and flashinfer_mla only, which plan on the host"},
        target=".wrappers.multi_step_draft:MultiStepDraft",
        note="over the backends whose drafts take a step each; counts are triton's",
        dispatches={"draft_decode": (2, 2)},
        compositions=tuple(
            {"inner": name}
            for name in ("triton", "flashinfer", "aiter", "trtllm_mha", "trtllm_mla", "dsa", "deepseek_v4")
        ),
    ),
    BackendInfo(
        name="hybrid_linear",
        kind="wrapper",
        family="both",
        pattern="-",
        modes=(*DECODE_MODES, "target_verify"),
        host_work={"*": "over backends that plan on the host only"},
        target=".wrappers.hybrid_linear:HybridLinear",
        note="over any backend and any of linear state; adds no dispatch of its own",
        dispatches={mode: (0, 0) for mode in (*DECODE_MODES, "target_verify")},
        compositions=(
            {"full": "triton", "linear": "mamba"},
            {"full": "trtllm_mha", "linear": "lightning"},
            {"full": "ascend", "linear": "ascend_gdn"},
        ),
    ),
    BackendInfo(
        name="deepseek_v4_hip_radix",
        kind="backend",
        family="compressed",
        pattern="B",
        modes=DECODE_MODES + SPEC_MODES,
        planners={"AITER's indexer schedule": NO_SIGNATURE, "the compressors' plans": NO_SIGNATURE},
        target=".deepseek_v4_hip_radix:DeepseekV4HipRadixBackend",
        note="metadata only, on the device at hand: no HIP kernel or AITER indexer is run, compressor plans are "
        "reference ones; pages and window as deepseek_v4; verify and draft extend dispatch 4 more per further request",
        lens="int64",
        dispatches={
            "decode": (None, 67),
            "idle": (None, 71),
            "draft_decode": (None, 67),
            "target_verify": (None, 83),
            "draft_extend": (None, 38),
            "draft_extend_v2": (None, 38),
        },
    ),
    BackendInfo(
        name="hybrid",
        kind="wrapper",
        family="either",
        pattern="-",
        modes=DECODE_MODES + SPEC_MODES + ("dllm_extend",),
        host_work={"*": "over backends that plan on the host only"},
        target=".wrappers.hybrid:Hybrid",
        note="a decode and a prefill backend, of which each batch reaches one; adds no dispatch of its own",
        dispatches={mode: (0, 0) for mode in DECODE_MODES + SPEC_MODES},
        compositions=(
            {"decode": "triton", "prefill": "flashattention"},
            {"decode": "trtllm_mha", "prefill": "flashinfer", "speculative_attention_mode": "decode"},
            {"decode": "triton", "prefill": "flashinfer", "dllm": "yes"},
        ),
    ),
    BackendInfo(
        name="tbo",
        kind="wrapper",
        family="halves",
        pattern="-",
        modes=(*DECODE_MODES, "target_verify"),
        host_work={"*": "over backends that plan on the host only: their halves are split again for the plan"},
        target=".wrappers.tbo:TwoBatchOverlap",
        note="counts are the split's, beside three rebuilds; tree masks add 2 and 4 a request of the first half",
        dispatches={"decode": (14, 14), "idle": (14, 14), "target_verify": (20, 20)},
        compositions=({"inner": "trtllm_mha"}, {"inner": "triton"}, {"inner": "flashattention"}),
    ),
    BackendInfo(
        name="decode",
        kind="runner",
        family="static_slots",
        pattern="-",
        modes=DECODE_MODES + SPEC_MODES,
        target=".runners.decode:DecodeRunner",
    ),
    BackendInfo(
        name="eagle_draft",
        kind="runner",
        family="static_slots",
        pattern="-",
        modes=("draft_decode",),
        target=".runners.eagle_draft:EagleDraftRunner",
    ),
    BackendInfo(
        name="eagle_draft_extend",
        kind="runner",
        family="static_slots",
        pattern="-",
        modes=("draft_extend_v2",),
        target=".runners.eagle_draft_extend:EagleDraftExtendRunner",
    ),
    BackendInfo(
        name="frozen_kv_mtp",
        kind="runner",
        family="static_slots",
        pattern="-",
        modes=("decode",),
        target=".runners.frozen_kv_mtp:FrozenKvMtpRunner",
    ),
    BackendInfo(
        name="multi_layer_eagle_draft_extend",
        kind="runner",
        family="static_slots",
        pattern="-",
        modes=("draft_extend_v2",),
        target=".runners.multi_layer_eagle_draft_extend:MultiLayerEagleDraftExtendRunner",
    ),
)


@cache
def registered() -> dict[str, BackendInfo]:
    """All entries by name, built-in first, then entry points. A third party cannot replace a built-in name."""
    found = {info.name: info for info in BUILTIN}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        info = point.load()
        if not isinstance(info, BackendInfo):
            raise TypeError(f"entry point {point.name!r} must be a BackendInfo, got {type(info).__name__}")
        found.setdefault(info.name, info)
    return found


def lookup(name: str, *kinds: str) -> BackendInfo:
    """The entry called `name`, of one of `kinds` (``backend`` if none is given).

    Raises:
        UnknownName: with the known names and the nearest one.
    """
    kinds = kinds or ("backend",)
    known = [info.name for info in registered().values() if info.kind in kinds]
    if name not in known:
        raise UnknownName(unknown_message(_any_of(kinds), name, known))
    return registered()[name]


def _any_of(kinds: Sequence[str]) -> str:
    """``backend, wrapper or runner``."""
    *others, last = kinds
    return f"{', '.join(others)} or {last}" if others else last


def unknown_message(what: str, name: str, known: list[str]) -> str:
    """``unknown backend 'x'. Known: a, b. Did you mean 'a'?``"""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {name!r}. Known: {', '.join(known)}.{hint}"
