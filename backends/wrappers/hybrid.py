"""Prefill and decode by different backends: every call goes to the one that its forward mode asks for.

| forward mode                | backend                                                            |
|-----------------------------|--------------------------------------------------------------------|
| decode, idle, draft_decode  | decode                                                             |
| target_verify, draft_extend | decode if speculative_attention_mode is "decode", else prefill     |
| draft_extend_v2, dllm       | prefill                                                            |

The mode is the captured one, so an idle rank that replays a verify graph reaches verify's backend. The wrapper adds
nothing to either: no buffers, no dispatches, no launches.

Options in `config.extra`: ``decode`` (triton) and ``prefill`` (flashattention), names of backends;
``speculative_attention_mode``, "prefill" (default) or "decode"; ``dllm``, whether a diffusion model's graphs are
captured. Others are the children's. Source: specs of SGLang's hybrid attention backend.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..base import Allowances, AttentionBackend, ConfigError
from ..batch import ForwardBatch
from ..modes import ForwardMode
from ..oracle import HostBatch
from ..registry import lookup
from .composed import Composed, Part, joined

Mode = ForwardMode
SPECULATIVE = ("prefill", "decode")
DEFAULTS = {"decode": "triton", "prefill": "flashattention"}


class Hybrid(Composed):
    """Two backends, of which each batch reaches one."""

    modes = frozenset(Mode) - {Mode.IDLE}

    def take_options(self) -> None:
        extra = self.config.extra
        self.speculative = extra.get("speculative_attention_mode", "prefill")
        if self.speculative not in SPECULATIVE:
            raise ConfigError(f"speculative_attention_mode must be prefill or decode, got {self.speculative!r}")
        names = (extra.get(name, default) for name, default in DEFAULTS.items())
        self.decode, self.prefill = (self.new_child(lookup(name).load()) for name in names)
        self.tail = self.decode.tail

    @property
    def children(self) -> Sequence[AttentionBackend]:
        """Those that have graph state: prefill only where a captured mode reaches it."""
        return (self.decode, self.prefill) if self.captures_prefill else (self.decode,)

    @property
    def captures_prefill(self) -> bool:
        verifies = self.config.draft_tokens > 0 and self.speculative == "prefill"
        return verifies or bool(self.config.extra.get("dllm"))

    @property
    def seq_len_fill_value(self) -> int:
        """seq_lens of padding rows: decode's, or prefill's where a diffusion model's graphs are captured."""
        return (self.prefill if self.config.extra.get("dllm") else self.decode).seq_len_fill_value

    @property
    def allowances(self) -> Allowances:
        both = {"decode": self.decode.allowances, "prefill": self.prefill.allowances}
        return joined(both, fused_launches=max(own.fused_launches for own in both.values()))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.max_bs = max_bs
        fills = {child.seq_len_fill_value for child in self.children}
        if len(fills) > 1:
            raise ConfigError(
                f"padding rows have one length, but decode's is {self.decode.seq_len_fill_value} and prefill's "
                f"{self.prefill.seq_len_fill_value}: they cannot share captured batches"
            )
        self.forward_hook("init_cuda_graph_state", max_bs, max_num_tokens)

    def selected(self, mode: ForwardMode) -> str:
        """Name of the child that serves a mode: "decode" or "prefill"."""
        if mode.captured in (Mode.DECODE, Mode.DRAFT_DECODE):
            return "decode"
        return self.speculative if mode in (Mode.TARGET_VERIFY, Mode.DRAFT_EXTEND) else "prefill"

    def parts(self, fb: ForwardBatch) -> list[Part]:
        name = self.selected(fb.forward_mode)
        if name == "prefill" and not self.captures_prefill:
            raise ConfigError(
                f"mode {fb.forward_mode} goes to the prefill backend, which has no graph state with "
                f"speculative_attention_mode {self.speculative!r}, draft_tokens {self.config.draft_tokens}: capture it "
                "on a backend of its own"
            )
        return [Part(name, getattr(self, name), fb)]

    def host_parts(self, batch: HostBatch) -> list[Part]:
        name = self.selected(Mode(batch.mode))
        return [Part(name, getattr(self, name), batch)]

    def forwarding(self, fb: ForwardBatch, hook: str) -> dict[str, int]:
        """How often each child must see a hook, by attribute."""
        if hook == "on_after_cuda_graph_warmup":
            return {"decode": 1, "prefill": 1} if self.captures_prefill else {"decode": 1}
        return {self.selected(fb.forward_mode): 1}
