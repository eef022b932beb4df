"""The first all-reduce: what its kernel is compiled to, and that an unarmed one meets nobody."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
from attn_graph.profilers.exchange import ExchangeError, GlooExchange, make_exchange, no_skew_us
from attn_graph.profilers.graphs import GraphFactory, RecordedGraph

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from attn_graph.profilers import flags

signature = {"control": "*i64", "waits": "*i64", "peers": "*i64", "rank": "i32", "capacity": "i32", "limit": "i64"}
source = ASTSource(
    flags.flag_exchange, signature | {"SIZE": "constexpr", "LANES": "constexpr"}, {(6,): 8, (7,): 32}
)
print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1}).asm["ptx"])
"""


def test_flags_are_released_and_acquired_system_wide_between_two_readings_of_the_clock():
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    made = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True, timeout=60)
    assert made.returncode == 0, made.stderr
    lines = made.stdout.splitlines()
    (sent,) = [i for i, line in enumerate(lines) if "atom.global.sys.release.exch.b32" in line]
    (seen,) = [i for i, line in enumerate(lines) if "atom.global.sys.acquire.add.u32" in line]
    first, last = [i for i, line in enumerate(lines) if "%globaltimer" in line]
    assert first < sent < seen < last
    assert "multimem" not in made.stdout  # NVLink multicast stays off


@pytest.fixture
def alone(tmp_path):
    """A process group of one rank."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_only_launches_between_arm_and_read_are_timed(alone):
    exchange, graph = GlooExchange(alone), RecordedGraph()
    graph.capture(exchange)
    graph.launch()
    exchange.arm()
    for _ in range(3):
        graph.launch()
    waits = exchange.read_us(3)
    assert waits.shape == (3,) and (waits > 0).all()
    graph.launch()
    exchange.arm()
    assert exchange.read_us(0).shape == (0,)


def test_a_launch_that_was_not_counted_is_an_error(alone):
    exchange = GlooExchange(alone)
    exchange.arm()
    with pytest.raises(ExchangeError, match="0 exchanges were counted where 2 were launched"):
        exchange.read_us(2)


def test_the_exchange_without_skew_is_timed_on_its_own(alone):
    met = []
    times = no_skew_us(GlooExchange(alone), GraphFactory(torch.device("cpu")), lambda: met.append(1))
    assert met == [1]
    assert times.size >= 100 and np.isfinite(times).all() and (times > 0).all()


def test_gpus_do_not_meet_over_gloo_nor_cpus_over_flags(alone):
    assert make_exchange("auto", alone, torch.device("cpu"), 10).kind == "gloo"
    with pytest.raises(ExchangeError, match="does not run on cpu"):
        make_exchange("symm", alone, torch.device("cpu"), 10)
