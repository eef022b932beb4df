"""Recurrent layers (Mamba2, gated delta rule, Kimi delta): the state slot of each request, and where its queries start.

With v live requests, the first rows of the batch (padding is its tail), and N tokens each in verify:

| field                                 | decode, idle                           | target_verify               |
|---------------------------------------|----------------------------------------|-----------------------------|
| mamba_cache_indices                   | state_slots[pool[b]], -1 from v on     | the same                    |
| query_start_loc                       | min(b, v)                              | min(b, v) * N               |
| retrieve_next_token, _sibling         | None                                   | topk > 1: links of live rows|
| retrieve_parent_token                 | None                                   | topk > 1: the kernel's own  |
| mamba_track_indices                   | slots to cache states in, where given  | the same                    |
| intermediate_state_indices (gdn)      | None                                   | b, constant                 |
| num_decodes, draft_token_num (mamba2) | B, 1                                   | B, N                        |
| req_pool_indices                      | the runner's: 0 from v on              | the same                    |
| write_pos (ring)                      | ring_cursors[slot], before they move   | the same                    |
| force_flush (ring)                    | length % interval == 0; kda: 0         | 0                           |
| ring_cursors (ring)                   | the pool's: those of live slots move   | as they were, or the same   |

Kernels skip rows whose slot is -1. The pool rows are zeroed before they are looked up, so that the look-up stays in
range, and -1 is written after it. Link rows of padding keep what they held; nobody follows them. Where a pool moves
states, all slots pass through `physical_slots` before the -1. Track slots are B, not a whole buffer: Mamba2 layers take
the last num_decodes of them.

How many rows are padding is asked of the engine. Without an answer they are counted, as older releases always did: rows
of length 1, which takes a live row of that length for padding, and padding for live where another backend of the
model chose the fill. A warm-up run of a capture updates the state of slot state_slots[0], which is therefore reserved.

Where a pool keeps the last inputs of each slot in a ring, to replay them from an older state, a rebuild says where this
step writes and whether the ring is flushed, and then moves the cursor of every distinct live slot: to 0 behind the last
entry or with a flush, else on by one. Only rows of requests move cursors: a capture, whose rows are all row 0, leaves
the rings alone. A slot that stands twice moves once, and is flushed if either row says so. It is the one table of the
engine that a rebuild writes, so no rebuild may run twice for one step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .aten_ops import live_token_count
from .base import Allowances, AttentionBackend, ConfigError
from .batch import PADDING_ROW, ForwardBatch
from .kernels.linear_state import PreparedLinearState, Ring
from .modes import ForwardMode
from .oracle import Expected, HostBatch, HostPools, mamba

Mode = ForwardMode

VARIANTS = ("gdn", "kda", "mamba2")


@dataclass(slots=True, kw_only=True)
class MambaMetadata:
    """Views into the instance's buffers, bound at capture. B = captured batch size."""

    mamba_cache_indices: torch.Tensor  # [B] int32, device
    query_start_loc: torch.Tensor  # [B + 1] int32, device
    retrieve_next_token: torch.Tensor | None  # [B, N] int32, device
    retrieve_next_sibling: torch.Tensor | None  # [B, N] int32, device
    retrieve_parent_token: torch.Tensor | None  # [B, N] int32, device; the conv kernel's to write
    mamba_track_indices: torch.Tensor | None  # [B] int64, device
    write_pos: torch.Tensor | None  # [B] int32, device
    force_flush: torch.Tensor | None  # [B] int32, device; 0 or 1
    ring_cursors: torch.Tensor | None  # [slots] int32, device; the pool's own
    captured: bool = False  # whether the classic chain has run: its first run, the capture's, moves and flushes nothing
    fused: PreparedLinearState | None = None  # bound at the first fused rebuild


@dataclass(slots=True, kw_only=True)
class GdnMetadata(MambaMetadata):
    """What the gated delta rule's verify kernel reads besides."""

    intermediate_state_indices: torch.Tensor | None  # [B] int32, device, constant


@dataclass(slots=True, kw_only=True)
class Mamba2Metadata(MambaMetadata):
    """Host constants by which Mamba2 layers split a mixed batch; a graph has no prefills."""

    num_decodes: int
    is_target_verify: bool
    draft_token_num: int
    num_prefills: int = 0
    num_prefill_tokens: int = 0


class MambaBackend(AttentionBackend):
    """Metadata of recurrent layers. Pattern A: capture and replay run the same refresh.

    Options, in config.extra: variant, one of VARIANTS; kda by default, which adds nothing to the fields they share.
    ring_interval (0), tokens between flushes of a replay ring; 0 is without a ring. ring_in_verify (False), whether
    verify moves cursors too, as older releases do.
    """

    modes = frozenset({Mode.DECODE, Mode.TARGET_VERIFY})
    padding_slot = -1
    """State slot of padding rows."""
    allowances = Allowances(
        shared_between_modes=frozenset({"mamba_cache_indices", "query_start_loc", "mamba_track_indices"})
    )
    has_rings = True
    """Whether the replay-ring option exists."""

    def take_options(self) -> None:
        extra = self.config.extra
        self.ring_interval, self.ring_in_verify = extra.get("ring_interval", 0), extra.get("ring_in_verify", False)
        if self.ring_interval:
            self._check_ring()
            shared = {"write_pos", "force_flush", "ring_cursors"}
            self.allowances = replace(
                self.allowances,
                shared_between_modes=self.allowances.shared_between_modes | shared,
                aliases=frozenset({frozenset({"ring_cursors", "pools.ring_cursors"})}),
                advances=frozenset({"ring_cursors"}),
            )

    def _check_ring(self) -> None:
        name, cursors, length = type(self).__name__, self.pools.ring_cursors, self.pools.ring_length
        if not self.has_rings:
            raise ConfigError(f"{name} has no replay rings: ring_interval must be 0, got {self.ring_interval}")
        if self.ring_interval < 0:
            raise ConfigError(f"ring_interval of {name} must be at least 1 token, or 0, got {self.ring_interval}")
        if cursors is None or length < 1:
            found = "None" if cursors is None else f"rings of {length} entries"
            raise ConfigError(f"ring_interval {self.ring_interval} of {name} needs pools.ring_cursors; got {found}")

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        name = type(self).__name__
        if max_num_tokens % max_bs:
            raise ConfigError(f"max_num_tokens {max_num_tokens} is no multiple of max_bs {max_bs}")
        if self.pools.state_slots is None:
            raise ConfigError(f"{name} needs pools.state_slots, the state slot of each request row; got None")
        self.variant = self.config.extra.get("variant", "kda")
        if self.variant not in VARIANTS:
            raise ConfigError(f"unknown variant {self.variant!r} of {name}. Known: {', '.join(VARIANTS)}")
        self.max_bs, self.tokens = max_bs, max_num_tokens // max_bs
        self.state_indices, self.query_starts = self._ints(-1, max_bs), self._ints(0, max_bs + 1)
        # One set for all sizes: graphs of one instance share their inputs and never run side by side.
        links = range(3) if self.config.topk > 1 else ()
        self.links = tuple(self._ints(0, max_bs, self.tokens) for _ in links)
        self.track_indices = self._ints(0, max_bs).long()
        if self.ring_interval:
            self.write_pos, self.force_flush = self._ints(0, max_bs), self._ints(0, max_bs)
            self.has_row = self._ints(0, len(self.pools.ring_cursors) + 1).bool()
        self.row_numbers = torch.arange(max_bs + 1, dtype=torch.int32, device=self.device)
        self.row_starts = self.row_numbers * self.tokens

    def _ints(self, value: int, *shape: int) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=self.device)

    def bind(self, fb: ForwardBatch) -> MambaMetadata:
        b, verify, common = fb.batch_size, self._verifies(fb), self._views(fb)
        if self.variant == "mamba2":
            draft_tokens = self.tokens if verify else 1
            return Mamba2Metadata(**common, num_decodes=b, is_target_verify=verify, draft_token_num=draft_tokens)
        if self.variant == "gdn":
            return GdnMetadata(**common, intermediate_state_indices=self.row_numbers[:b] if verify else None)
        return MambaMetadata(**common)

    def _views(self, fb: ForwardBatch) -> dict[str, torch.Tensor | None]:
        """The fields that all variants have."""
        b, n, verify = fb.batch_size, self.tokens, self._verifies(fb)
        if not 0 < b <= self.max_bs:
            raise ConfigError(f"batch size {b} is not within 1..{self.max_bs}, the rows of mamba_cache_indices")
        if verify and fb.spec_info.draft_token_num != n:
            raise ConfigError(f"verify has {fb.spec_info.draft_token_num} draft tokens, the buffers have {n} a request")
        links = [x[:b] for x in self.links] if verify and self.links else (None, None, None)
        return {
            "mamba_cache_indices": self.state_indices[:b],
            "query_start_loc": self.query_starts[: b + 1],
            "retrieve_next_token": links[0],
            "retrieve_next_sibling": links[1],
            "retrieve_parent_token": links[2],
            "mamba_track_indices": None if fb.mamba_track_indices is None else self.track_indices[:b],
            "write_pos": self.write_pos[:b] if self.ring_interval else None,
            "force_flush": self.force_flush[:b] if self.ring_interval else None,
            "ring_cursors": self.pools.ring_cursors if self.ring_interval else None,
        }

    # The classic chain, op for op as upstream's. The number of padding rows may be a tensor on the host, when every
    # use of it subtracts, reads and slices anew.

    def rebuild_aten(self, fb: ForwardBatch, md: MambaMetadata) -> None:
        padding = self._padding(fb)
        slots = self._aten_slots(fb, md, padding)
        self._aten_track(fb, md)
        self._aten_starts(fb, md, padding)
        self._aten_links(fb, md)
        if md.ring_cursors is not None:
            self._aten_ring(fb, md, slots)

    def _padding(self, fb: ForwardBatch) -> torch.Tensor | int:
        """Padding rows: what the engine says, else as many as have the fill length, else none."""
        if fb.num_padding is not None:
            return fb.num_padding
        if fb.seq_lens_cpu is None:
            return 0
        return (first_rows(fb.seq_lens_cpu, fb.batch_size) == self.seq_len_fill_value).count_nonzero()

    def _aten_slots(self, fb: ForwardBatch, md: MambaMetadata, padding: torch.Tensor | int) -> torch.Tensor:
        b = fb.batch_size
        pool = first_rows(fb.req_pool_indices, b)
        pool[b - padding :] = 0
        slots = self._physical(self.pools.state_slots[pool])
        slots[b - padding :] = self.padding_slot
        md.mamba_cache_indices[: len(slots)].copy_(slots)
        return slots

    def _physical(self, slots: torch.Tensor) -> torch.Tensor:
        return slots if self.pools.physical_slots is None else self.pools.physical_slots[slots]

    def _aten_track(self, fb: ForwardBatch, md: MambaMetadata) -> None:
        if md.mamba_track_indices is not None:
            md.mamba_track_indices.copy_(self._physical(fb.mamba_track_indices[: fb.batch_size]))

    def _aten_starts(self, fb: ForwardBatch, md: MambaMetadata, padding: torch.Tensor | int) -> None:
        b, verify = fb.batch_size, self._verifies(fb)
        starts = self.row_starts if verify else self.row_numbers
        if padding == 0:
            md.query_start_loc.copy_(starts[: b + 1])
        else:
            md.query_start_loc[: b - padding].copy_(starts[: b - padding])
            end = b - padding
            md.query_start_loc[b - padding :].fill_(end * self.tokens if verify else end)

    def _aten_links(self, fb: ForwardBatch, md: MambaMetadata) -> None:
        if md.retrieve_next_token is None or fb.spec_info.retrieve_next_token is None:
            return
        for field, links in (
            (md.retrieve_next_token, fb.spec_info.retrieve_next_token),
            (md.retrieve_next_sibling, fb.spec_info.retrieve_next_sibling),
        ):
            field[: links.shape[0]].copy_(links)

    def _aten_ring(self, fb: ForwardBatch, md: MambaMetadata, slots: torch.Tensor) -> None:
        b, interval = len(slots), self._flush_interval(fb) if md.captured else 0
        md.write_pos[:b].copy_(md.ring_cursors[slots.clamp(min=0)])
        if interval:
            lengths = (fb.seq_lens if fb.seq_lens_cpu is None else fb.seq_lens_cpu)[:b]
            md.force_flush[:b].copy_((lengths % interval == 0).to(torch.int32))
        else:
            md.force_flush.zero_()
        if self._moves_cursors(fb) and md.captured:
            self._aten_move(md, slots)
        md.captured = True

    def _aten_move(self, md: MambaMetadata, slots: torch.Tensor) -> None:
        """Move the cursor of each distinct slot of the batch."""
        length, live = self.pools.ring_length, slots >= 0
        cursor, (distinct, row) = md.write_pos[live], slots[live].unique(return_inverse=True)
        restarts = (cursor == length - 1) | md.force_flush[live].bool()
        following = torch.where(restarts, torch.zeros_like(cursor), (cursor + 1) % length)
        # 0 is the least: one row that flushes is enough.
        least = cursor.new_empty(len(distinct)).scatter_reduce_(0, row, following, "amin", include_self=False)
        md.ring_cursors[distinct] = least

    # What a graph can hold asks the device how many rows are live.

    def rebuild_aten_static(self, fb: ForwardBatch, md: MambaMetadata) -> None:
        b, n = fb.batch_size, self._width(fb)
        requests = live_token_count(fb, "which rows are padding") // n
        live = self.row_numbers[:b] < requests
        pool = fb.req_pool_indices[:b]
        pool.mul_(live)
        slots = self._physical(self.pools.state_slots[pool])
        md.mamba_cache_indices.copy_(slots.masked_fill_(~live, self.padding_slot))
        self._aten_track(fb, md)
        md.query_start_loc.copy_(torch.minimum(self.row_numbers[: b + 1], requests) * n)
        if md.retrieve_next_token is not None:
            rows = live[:, None]
            for field, links in (
                (md.retrieve_next_token, fb.spec_info.retrieve_next_token),
                (md.retrieve_next_sibling, fb.spec_info.retrieve_next_sibling),
            ):
                field.copy_(torch.where(rows, links, field))
        if md.ring_cursors is not None:
            self._static_ring(fb, md, pool > PADDING_ROW)

    def _static_ring(self, fb: ForwardBatch, md: MambaMetadata, requests: torch.Tensor) -> None:
        cursors, slots, interval = md.ring_cursors, md.mamba_cache_indices, self._flush_interval(fb)
        md.write_pos.copy_(cursors[slots.clamp(min=0)])
        if interval:
            md.force_flush.copy_(fb.seq_lens[: fb.batch_size] % interval == 0)
        else:
            md.force_flush.zero_()
        if not self._moves_cursors(fb):
            return
        following = (cursors + 1) % self.pools.ring_length
        moves = requests & (slots >= 0)
        if interval:
            following.masked_fill_(self._slots_of(moves & (md.force_flush > 0), slots), 0)
        cursors.copy_(torch.where(self._slots_of(moves, slots), following, cursors))

    def _slots_of(self, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """[slots] bool: which slots these rows have; until the next call."""
        spare = len(self.has_row) - 1  # where all other rows go
        return self.has_row.zero_().index_fill_(0, slots.masked_fill(~rows, spare).long(), True)[:spare]

    def rebuild_fused(self, fb: ForwardBatch, md: MambaMetadata) -> None:
        if md.fused is None:
            md.fused = PreparedLinearState(**self._launch_arguments(fb, md))
        links = (None, None)
        if md.retrieve_next_token is not None:
            links = fb.spec_info.retrieve_next_token, fb.spec_info.retrieve_next_sibling
        lengths = fb.seq_lens if self.ring_interval else None
        md.fused(
            fb.req_pool_indices, live_token_count(fb, "which rows are padding"), *links, fb.mamba_track_indices, lengths
        )

    def _launch_arguments(self, fb: ForwardBatch, md: MambaMetadata) -> dict:
        """Everything that `PreparedLinearState` is bound to."""
        return {
            "req_pool_indices": fb.req_pool_indices,
            "state_slots": self.pools.state_slots,
            "live_tokens": live_token_count(fb, "which rows are padding"),
            "state_indices": md.mamba_cache_indices,
            "query_start_loc": md.query_start_loc,
            "physical_slots": self.pools.physical_slots,
            "track": md.mamba_track_indices,
            "next_token": md.retrieve_next_token,
            "next_sibling": md.retrieve_next_sibling,
            "ring": self._ring(fb, md),
            "bs": fb.batch_size,
            "width": self._width(fb),
            "padding_slot": self.padding_slot,
        }

    def expected(self, batch: HostBatch, pools: HostPools) -> dict[str, Expected]:
        return mamba.expected(
            batch,
            pools,
            draft_tokens=self.tokens,
            topk=self.config.topk,
            variant=self.variant,
            ring_interval=self.ring_interval,
            ring_in_verify=self.ring_in_verify,
        )

    def _flush_interval(self, fb: ForwardBatch) -> int:
        """Tokens between flushes; 0 where nothing is flushed."""
        return 0 if self.variant == "kda" or self._verifies(fb) else self.ring_interval

    def _moves_cursors(self, fb: ForwardBatch) -> bool:
        return not self._verifies(fb) or self.ring_in_verify

    def _ring(self, fb: ForwardBatch, md: MambaMetadata) -> Ring | None:
        if md.ring_cursors is None:
            return None
        return Ring(
            cursors=md.ring_cursors,
            length=self.pools.ring_length,
            seq_lens=fb.seq_lens,
            interval=self._flush_interval(fb),
            moves=self._moves_cursors(fb),
            write_pos=md.write_pos,
            force_flush=md.force_flush,
        )

    @staticmethod
    def _verifies(fb: ForwardBatch) -> bool:
        return fb.forward_mode is Mode.TARGET_VERIFY

    def _width(self, fb: ForwardBatch) -> int:
        """Query tokens of a request."""
        return self.tokens if self._verifies(fb) else 1


def first_rows(x: torch.Tensor, b: int) -> torch.Tensor:
    """The first b rows; no view where that is all of them."""
    return x if x.shape[0] == b else x[:b]
