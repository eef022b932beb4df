"""Recorded cases of an engine (``data/goldens``), replayed through our runner and compared where a kernel may read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from attn_graph.backends.base import AttentionConfig, tensors_of
from attn_graph.backends.batch import LiveBatch, Pools
from attn_graph.backends.modes import Arm, ForwardMode
from attn_graph.backends.oracle import Expected
from rebuilds import Replayer, host_pools

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FOLDER = Path(__file__).parent / "data" / "goldens"

MODES = {
    "decode": ForwardMode.DECODE,
    "draft": ForwardMode.DRAFT_DECODE,
    "verify": ForwardMode.TARGET_VERIFY,
    "dext": ForwardMode.DRAFT_EXTEND,
    "dext_v1": ForwardMode.DRAFT_EXTEND,
    "dext_v2": ForwardMode.DRAFT_EXTEND_V2,
    "dllm": ForwardMode.DLLM_EXTEND,
}


def cases(backend: str) -> list[Path]:
    """Every recorded case of a backend: those here, and those in the folder that ATTN_GRAPH_GOLDENS names."""
    more = os.environ.get("ATTN_GRAPH_GOLDENS")
    folders = [FOLDER, Path(more)] if more else [FOLDER]
    return sorted(case for folder in folders for case in (folder / backend).glob("*.npz"))


@dataclass(frozen=True, slots=True)
class Replayed:
    """One replay: what ours holds, what the oracle says, what the engine left.

    Attributes:
        got: our metadata by path.
        expected: the oracle's word on it.
        golden: the engine's tensors by their name in the file, ``static/`` ones included.
        host: host scalars of the engine, and its counts.
    """

    got: dict[str, np.ndarray]
    expected: dict[str, Expected]
    golden: dict[str, np.ndarray]
    host: dict

    def differences(
        self, field: str, name: str | None = None, rows: int | None = None, *, within_recorded: bool = False
    ) -> list[str]:
        """Live cells of `field` that differ from the recorded tensor `name`, over the columns both have.

        rows: compare the first ones of a recorded buffer that has more.
        within_recorded: the recorded table may be too narrow for its lengths.
        """
        recorded, want, got = self.golden[name or field][:rows], self.expected[field], self.got[field]
        assert recorded.dtype == got.dtype and len(recorded) == len(got)
        common = tuple(slice(min(a, b)) for a, b in zip(recorded.shape, got.shape, strict=True))
        live, a, b = want.live[common], recorded[common], got[common]
        assert within_recorded or want.live.sum() == live.sum(), f"{field}: the recorded table is too narrow"
        wrong = np.argwhere(live & (a != b)).tolist()
        return [f"{field}{at}: {b[tuple(at)]}, recorded {a[tuple(at)]}" for at in wrong]

    def flat_differences(self, field: str) -> list[str]:
        """The same for a flat buffer, whose size may be another than the recorded one's behind the live cells."""
        recorded, live, got = self.golden[field], self.expected[field].live, self.got[field]
        n = int(live.sum())
        assert recorded.dtype == got.dtype and live[:n].all() and len(recorded) >= n, field
        wrong = np.flatnonzero(recorded[:n] != got[:n]).tolist()
        return [f"{field}[{i}]: {got[i]}, recorded {recorded[i]}" for i in wrong]


class Golden:
    """One file."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as data:
            self.data = {key: data[key] for key in data.files}
        self.config = json.loads(str(self.data["config"]))
        self.mode = MODES[self.config["mode"]]

    def pools(self) -> Pools:
        there = lambda key: torch.from_numpy(self.data[key]).to(DEVICE) if key in self.data else None  # noqa: E731
        return Pools(
            there("init/req_to_token"),
            there("init/full_to_swa"),
            state_slots=there("init/mamba_index_mapping"),
            ring_cursors=there("init/ring_cursors"),
            ring_length=self.config["extra"].get("ring_length", 0),
        )

    def attention_config(self, step_id: int = 0, **extra) -> AttentionConfig:
        c = self.config
        return AttentionConfig(
            page_size=c["P"],
            max_context=c["C"],
            draft_tokens=c["N"],
            topk=c["K"],
            draft_steps=c["S"],
            step_id=step_id,
            window=c["window"],
            num_heads=c["heads"],
            num_kv_heads=c["kv_heads"],
            max_requests=c["pool_size"],
            extra=extra,
        )

    def split_options(self) -> dict:
        """Options of the Triton backend and of its relatives: the file's own, and server arguments by our names."""
        extra = self.config["extra"]
        server = extra.get("server_args", {})
        names = {
            "max_kv_splits": "triton_attention_num_kv_splits",
            "split_tile_size": "triton_attention_split_tile_size",
            "deterministic": "enable_deterministic_inference",
        }
        given = {ours: server[theirs] for ours, theirs in names.items() if server.get(theirs) is not None}
        return {"core_count": self.config["cores"], "use_mla": extra.get("mla", False), **given, **extra}

    def live(self, i: int, step_id: int = 0) -> LiveBatch:
        """The scheduler's batch of replay i; in draft decode of a chain the write slots of one step, else of all."""
        given = self._group(f"r{i}/in/")
        idle = not len(given["seq_lens"])
        slots = given["out_cache_loc"]
        if self.mode is ForwardMode.DRAFT_DECODE and self.config["K"] <= 1:
            slots = slots.reshape(-1, self.config["S"])[:, step_id].copy()
        return LiveBatch(
            mode=ForwardMode.IDLE if idle else self.mode,
            req_pool_indices=given["req_pool_indices"],
            seq_lens=given["seq_lens"],
            out_cache_loc=slots,
            positions=given["positions"],
            num_accept_tokens=given.get("num_accept_tokens"),
            custom_mask=given.get("custom_mask"),
            retrieve_next_token=given.get("retrieve_next_token"),
            retrieve_next_sibling=given.get("retrieve_next_sibling"),
            encoder_lens=given.get("encoder_lens"),
        )

    def host(self, i: int) -> dict:
        """Host scalars and counts of replay i."""
        return json.loads(str(self.data[f"r{i}/host"]))

    def captured(self, backend_class, arm: Arm, step_id: int = 0, max_bs: int | None = None, **extra) -> Replayer:
        """Our backend, captured for the file's mode and size; `max_bs` where buffers must be as large as recorded."""
        c = self.config
        recorded = arm.placement.value != "eager"
        backend = backend_class(
            self.attention_config(step_id, **extra), self.pools(), arm.implementation, recorded=recorded
        )
        return Replayer.capture(
            backend,
            self.mode,
            c["B"],
            arm.placement,
            tokens_per_req=c["tokens_per_req"],
            fill=c["fill"],
            lens=getattr(torch, c["seq_lens_static_dtype"].removeprefix("torch.")),
            max_bs=max_bs,
            mask_context=c["C"] if c["mask"] else 0,
            encoder_fill=int(self.data["capture/in/encoder_lens"][0]) if c["encoder"] else None,
            slots_per_token=c["S"] if self.mode is ForwardMode.DRAFT_DECODE and c["K"] > 1 else 1,
        )

    def replays(self, backend_class, arm: Arm, step_id: int = 0, **extra) -> Iterator[Replayed]:
        """Capture once, then every replay of the file, on poisoned buffers, in one arm."""
        c, own = self.config, self.captured(backend_class, arm, step_id, **extra)
        backend = own.backend
        for i in range(c["replays"]):
            live = self.live(i, step_id)
            assert own.differences(live, i) == []
            batch = own.load(live)
            for name in ("seq_lens", "req_pool_indices"):
                np.testing.assert_array_equal(getattr(batch, name), self.data[f"r{i}/static/{name}"])
            bound = tensors_of(backend.metadata[self.mode, c["B"]])
            yield Replayed(
                got={path: t.cpu().numpy().copy() for path, t in bound.items()},
                expected=backend.expected(batch, host_pools(backend.pools)),
                golden=self._group(f"r{i}/out/") | {f"live/{k}": v for k, v in self._group(f"r{i}/live/").items()},
                host=self.host(i),
            )

    def _group(self, prefix: str) -> dict[str, np.ndarray]:
        return {key.removeprefix(prefix): value for key, value in self.data.items() if key.startswith(prefix)}
