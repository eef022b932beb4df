"""Engines that keep no lengths on the host: a rebuild is right without them, or refuses in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from attn_graph.backends.aten_ops import tokens_on_host
from attn_graph.backends.base import ConfigError
from attn_graph.backends.batch import ForwardBatch, idle_batch
from attn_graph.backends.modes import ForwardMode
from attn_graph.backends.registry import BackendInfo, registered
from attn_graph.profilers.conformance import subject as subjects
from attn_graph.profilers.conformance.matrix import CHEAPEST, HAVE_METADATA, Sizes
from attn_graph.profilers.conformance.subject import COMPARED, Rig, Subject
from conftest import HAS_GPU

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
BACKENDS = [info for info in registered().values() if info.kind in HAVE_METADATA]

REFUSE = {("flashinfer_mla", 1), ("flashinfer", 4), ("hybrid", 4), ("tbo", 4)}
"""Who may, by name and K: a plan of host lengths, the length of a tree mask, and where its second half begins."""


def kinds(info: BackendInfo, mode: ForwardMode) -> list[tuple[tuple[str, object], ...]]:
    """What a wrapper is made of, or a backend's options."""
    given = info.compositions or ({}, *info.options_in(str(mode)))
    return [tuple(options.items()) for options in given]


def tiny(info: BackendInfo, mode: ForwardMode, topk: int, options) -> Subject | None:
    """The first sizes that the backend takes; None where it takes none, as of trees."""
    for page in (16, 64, 128, 256):
        for swa in (False, True):
            sizes = Sizes(page, page + 20, (3,), topk=topk, draft_steps=3, swa=swa, options=options)
            try:
                return sizes.subject(info.name, mode, DEVICE, (CHEAPEST,), seed=0)
            except ConfigError:
                continue
    return None


def problems(rig: Rig) -> Iterator[str]:
    """What three batches without host lengths leave wrong."""
    on = rig.subject
    batches = [on.some_batch(3, seed=1), on.some_batch(2, seed=2)]
    if on.case.mode == ForwardMode.IDLE:
        batches.append(idle_batch())
    for number, live in enumerate(batches):
        try:
            yield from map(str, rig.replay(live, number))
        except ConfigError as refusal:
            if "seq_lens_cpu" not in str(refusal) or "keep a mirror" not in str(refusal):
                yield f"{refusal} does not say what is missing and what to do"
            if (on.case.backend, max(on.case.topk, 1)) not in REFUSE:
                yield f"refused: {refusal}"


@pytest.fixture
def no_mirror(monkeypatch):
    upload = subjects.upload
    monkeypatch.setattr(subjects, "upload", lambda *args, **kwargs: replace(upload(*args, **kwargs), seq_lens_cpu=None))


CASES = [(info, ForwardMode(mode), k) for info in BACKENDS for mode in info.modes for k in (1, 4)]
CASES = [(info, mode, k) for info, mode, k in CASES if k == 1 or mode.is_speculative]


@pytest.mark.parametrize(("info", "mode", "topk"), CASES, ids=lambda x: getattr(x, "name", str(x)))
def test_a_rebuild_without_host_lengths_is_right_or_refused_in_every_arm(info, mode, topk, no_mirror):
    taken = [on for options in kinds(info, mode) if (on := tiny(info, mode, topk, options))]
    assert taken or topk > 1
    for on in taken:
        for arm in COMPARED:
            try:
                rig = on.rig(arm)
            except ConfigError:
                continue  # this arm it has not
            assert not list(problems(rig)), f"{arm} [{on.title}]"


def test_a_sum_that_the_engine_does_not_keep_is_that_of_the_mirror_or_refused():
    batch = ForwardBatch(ForwardMode.TARGET_VERIFY, 2, torch.ones(3), torch.tensor([5, 6, 7]))
    assert tokens_on_host(replace(batch, seq_lens_cpu=torch.tensor([5, 6, 7]))) == 11
    assert tokens_on_host(replace(batch, seq_lens_sum=12)) == 12
    with pytest.raises(ConfigError, match=r"seq_lens_sum and seq_lens_cpu are None: .* keep a mirror"):
        tokens_on_host(batch)


def test_whoever_may_refuse_does(no_mirror):
    """So that the table above is no leave for more than there is."""
    refused = set()
    for info, mode, topk in CASES:
        if (info.name, topk) in REFUSE - refused:
            for on in filter(None, (tiny(info, mode, topk, options) for options in kinds(info, mode))):
                try:
                    on.rig(CHEAPEST).replay(on.some_batch(3, seed=1), 0)
                except ConfigError:
                    refused.add((info.name, topk))
    assert refused == REFUSE
