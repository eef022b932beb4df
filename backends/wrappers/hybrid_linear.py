"""Models of full and linear attention layers: one backend of each kind, both told everything, in that order.

| what           | full                       | linear                                         |
|----------------|----------------------------|------------------------------------------------|
| metadata       | ``full.*``                 | ``linear.*``                                   |
| layers         | those in ``full_layers``   | all others                                     |
| fill length    | its own                    | the full backend's: it must not count by value |
| pool rows      | reads them first           | then zeroes those of padding, in place         |

Decode and verify only: draft models have no linear layers, so their graphs belong to the full backend alone. The
wrapper itself dispatches and launches nothing; a rebuild is the launches of both, each the same kernel as unwrapped.
Source: specs of SGLang's hybrid linear attention wrapper.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..base import Allowances, AttentionBackend, AttentionConfig, ConfigError
from ..batch import ForwardBatch, Pools
from ..modes import ForwardMode, Implementation, TailPolicy
from ..oracle import Expected, HostBatch, HostPools
from ..registry import lookup
from .forwarding import Forwarding

Mode = ForwardMode

LINEAR = "linear_state"
"""Family, in the registry, of what can be the linear half."""


class HybridLinear(Forwarding):
    """Full and linear attention backends behind one name.

    Options, in config.extra: full ("triton") and linear ("mamba"), registry names; full_layers (none), the ids of
    layers with full attention. Other options are the children's.

    `metadata` holds {"full": ..., "linear": ...}, the children's own objects.
    """

    modes = frozenset({Mode.DECODE, Mode.TARGET_VERIFY})

    def __init__(
        self,
        config: AttentionConfig,
        pools: Pools,
        implementation: Implementation = Implementation.FUSED,
        *,
        recorded: bool = True,
        tail: TailPolicy | None = None,
    ) -> None:
        full, linear = (config.extra.get(side, name) for side, name in (("full", "triton"), ("linear", "mamba")))
        for side, name, wanted in (("full", full, False), ("linear", linear, True)):
            if (lookup(name).family == LINEAR) is not wanted:
                raise ConfigError(f"the {side} half of hybrid_linear cannot be {name}, of family {lookup(name).family}")
        self.full, self.linear = (
            self.child_class(name)(config, pools, implementation, recorded=recorded, tail=tail)
            for name in (full, linear)
        )
        super().__init__(config, pools, implementation, recorded=recorded, tail=self.full.tail)
        self.allowances = _both(self.full.allowances, self.linear.allowances)
        self.full_layers = frozenset(config.extra.get("full_layers", ()))

    @staticmethod
    def child_class(name: str) -> type[AttentionBackend]:
        return lookup(name).load()

    @property
    def children(self) -> Sequence[AttentionBackend]:
        return self.full, self.linear

    @property
    def seq_len_fill_value(self) -> int:
        """seq_lens of padding rows: the full backend's. The linear one is told how many there are."""
        return self.full.seq_len_fill_value

    def serving(self, layer: int) -> AttentionBackend:
        """The child whose metadata a layer reads."""
        return self.full if layer in self.full_layers else self.linear

    def init_forward_metadata_out_graph(self, fb: ForwardBatch, in_capture: bool = False) -> None:
        if in_capture:
            self._check_mode(fb)  # before the full backend, which may have the mode, has bound anything
        self.forward_hook("init_forward_metadata_out_graph", fb, in_capture=in_capture)
        AttentionBackend.init_forward_metadata_out_graph(self, fb, in_capture)

    def bind(self, fb: ForwardBatch) -> dict[str, object]:
        return {"full": self.full.forward_metadata, "linear": self.linear.forward_metadata}

    def rebuild_aten(self, fb: ForwardBatch, md: dict[str, object]) -> None:
        """Nothing: the children rebuild, each in its own hooks."""

    rebuild_aten_static = rebuild_fused = rebuild_aten

    def expected(self, batch: HostBatch, pools: HostPools) -> dict[str, Expected]:
        sides = {"full": self.full, "linear": self.linear}
        return {
            f"{side}.{name}": want
            for side, child in sides.items()
            for name, want in child.expected(batch, pools).items()
        }


def _both(full: Allowances, linear: Allowances) -> Allowances:
    """What either child does on purpose, by its path in the wrapper's metadata."""
    sides = (("full", full), ("linear", linear))

    def path(side: str, name: str) -> str:
        return name if name.startswith("slots.") else f"{side}.{name}"

    def paths(kind: str) -> frozenset[str]:
        return frozenset(path(side, name) for side, own in sides for name in getattr(own, kind))

    modes = full.dispatches_per_request.keys() | linear.dispatches_per_request.keys()
    return Allowances(
        aliases=frozenset(
            frozenset(path(side, name) for name in group) for side, own in sides for group in own.aliases
        ),
        shared_between_modes=paths("shared_between_modes"),
        spills=paths("spills"),
        unordered=paths("unordered"),
        fused_launches=full.fused_launches + linear.fused_launches,
        dispatches_per_request={m: sum(own.dispatches_per_request.get(m, 0) for _, own in sides) for m in modes},
        syncs_per_request=full.syncs_per_request + linear.syncs_per_request,
    )
