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
from dataclasses import replace

from ..base import AttentionBackend, ConfigError
from ..batch import ForwardBatch
from ..modes import ForwardMode
from ..oracle import HostBatch
from ..registry import lookup
from .composed import Composed, Part, joined

Mode = ForwardMode

LINEAR = "linear_state"
"""Family, in the registry, of what can be the linear half."""


class HybridLinear(Composed):
    """Full and linear attention backends behind one name.

    Options, in config.extra: full ("triton") and linear ("mamba"), registry names; full_layers (none), the ids of
    layers with full attention. Other options are the children's.

    `metadata` holds {"full": ..., "linear": ...}, the children's own objects.
    """

    modes = frozenset({Mode.DECODE, Mode.TARGET_VERIFY})

    def take_options(self) -> None:
        extra = self.config.extra
        full, linear = (extra.get(side, name) for side, name in (("full", "triton"), ("linear", "mamba")))
        for side, name, wanted in (("full", full, False), ("linear", linear, True)):
            if (lookup(name).family == LINEAR) is not wanted:
                raise ConfigError(f"the {side} half of hybrid_linear cannot be {name}, of family {lookup(name).family}")
        self.full, self.linear = (self.new_child(self.child_class(name)) for name in (full, linear))
        self.tail = self.full.tail
        full, linear = self.full.allowances, self.linear.allowances
        self.allowances = replace(
            joined({"full": full, "linear": linear}, fused_launches=full.fused_launches + linear.fused_launches),
            dispatches_per_request=full.dispatches_per_request,  # a linear half does the same for any batch
            syncs_per_request=full.syncs_per_request,
        )
        self.full_layers = frozenset(extra.get("full_layers", ()))

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

    def parts(self, fb: ForwardBatch) -> list[Part]:
        return [Part("full", self.full, fb), Part("linear", self.linear, fb)]

    def host_parts(self, batch: HostBatch) -> list[Part]:
        return [Part("full", self.full, batch), Part("linear", self.linear, batch)]
