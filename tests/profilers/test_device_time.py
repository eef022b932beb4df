"""Marginal device time: the arithmetic on a made-up device, the real one on a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from attn_graph.profilers.device_time import (
    EAGER_COUNTS,
    GpuTimer,
    Laps,
    eager_device_us,
    interleaved_us,
    marginal_us,
)
from attn_graph.profilers.devices import DeviceError
from attn_graph.profilers.graphs import CaptureError

LAUNCH_US = 7.0
FLUSH_US = 60.0


class MadeUpDevice:
    """Work costs what it says; a graph costs LAUNCH_US more than its bodies; the queue may run dry."""

    def __init__(self, gapless: bool = True) -> None:
        self.now_us = 0.0
        self.gapless = gapless
        self.started: list[str] = []

    def work(self, cost_us, name: str = ""):
        def body() -> None:
            self.started.append(name)
            self.now_us += cost_us() if callable(cost_us) else cost_us

        return body

    def captured(self, body, n):
        def replay() -> None:
            self.now_us += LAUNCH_US
            for _ in range(n):
                body()

        return replay

    def flush(self) -> None:
        self.now_us += FLUSH_US

    def laps(self, *stretches) -> Laps:
        us = []
        for stretch in stretches:
            before = self.now_us
            stretch()
            us.append(self.now_us - before)
        return Laps(tuple(us), self.gapless)


def test_what_a_launch_costs_is_not_counted_as_the_bodys():
    device = MadeUpDevice()
    assert marginal_us(device.work(1.25), timer=device, repeats=3) == pytest.approx([1.25] * 3)


def test_dividing_one_graph_by_its_count_would_overstate():
    device = MadeUpDevice()
    graph = device.captured(device.work(1.25), 40)
    assert device.laps(graph).us[0] / 40 > 1.25 * 1.1


def test_cold_times_do_not_hold_the_flush():
    device = MadeUpDevice()
    assert marginal_us(device.work(2.5), timer=device, cold=True, repeats=2) == pytest.approx([2.5] * 2)


def test_a_body_that_costs_nothing_is_zero_and_one_that_the_timer_calls_negative_stays_so():
    device = MadeUpDevice()
    assert marginal_us(device.work(0.0), timer=device, repeats=1) == pytest.approx([0.0])
    assert marginal_us(device.work(-0.5), timer=device, repeats=1) == pytest.approx([-0.5])


def test_bodies_are_sampled_in_turns_in_an_order_that_rotates():
    device = MadeUpDevice()
    bodies = {name: device.work(1.0, name) for name in "abc"}
    interleaved_us(bodies, timer=device, repeats=3, counts=(1, 2))
    turns = [name for i, name in enumerate(device.started) if i == 0 or device.started[i - 1] != name]
    warming, samples = "abc", "abc" + "bca" + "cab"
    assert "".join(turns) == warming + samples


def test_drift_hits_every_body_alike():
    """The device slows down by a third over the run: in turns the ratio stays, one after the other it would not."""
    device, done = MadeUpDevice(), [0]

    def drifting(cost_us: float):
        def cost() -> float:
            done[0] += 1
            return cost_us * (1 + done[0] / 6000)

        return cost

    bodies = {"a": device.work(drifting(1.0)), "b": device.work(drifting(1.1))}
    found = interleaved_us(bodies, timer=device, repeats=6, counts=(4, 12))
    assert found["a"][-1] > 1.1 * found["a"][0]
    assert sum(found["b"]) / sum(found["a"]) == pytest.approx(1.1, rel=0.01)


def test_a_hiccup_of_the_host_does_not_lengthen_every_lap_after_it(monkeypatch):
    """Queueing takes 50 us, but 10 ms once: the sleep before that lap grows, and those after it are short again."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    timer = GpuTimer.__new__(GpuTimer)
    timer.device, timer._stream, timer._lead_us = torch.device("cuda"), None, 300.0
    queueing = iter([50.0, 10_000.0, 10_000.0, 10_000.0, 10_000.0, 50.0, 50.0])
    leads = []

    def behind(lead_us, stretches):
        leads.append(lead_us)
        took = next(queueing)
        return Laps((1.0,), gapless=took < lead_us), took

    timer._laps_behind = behind
    assert [timer.laps().gapless for _ in range(4)] == [True] * 4
    assert leads == [300.0, 300.0, 1200.0, 4800.0, 19200.0, 19200.0, 300.0]


def test_a_queue_that_runs_dry_is_an_error_in_a_graph_and_a_status_when_dispatched():
    device = MadeUpDevice(gapless=False)
    with pytest.raises(DeviceError, match="did not reach the device in time"):
        marginal_us(device.work(1.0), timer=device)
    times = eager_device_us(device.work(1.0), timer=device)
    assert (times.status, list(times)) == ("unsupported", [])
    assert "waits for the device" in times.cause


def test_dispatched_time_is_that_of_one_more_body():
    device = MadeUpDevice()
    first = iter([9.0] * sum(EAGER_COUNTS) + [3.0] * 100)
    times = eager_device_us(device.work(lambda: next(first)), timer=device, repeats=4)
    assert (times.status, list(times)) == ("ok", pytest.approx([3.0] * 4))


@pytest.mark.parametrize("measure", [marginal_us, partial(marginal_us, cold=True), eager_device_us])
def test_a_cpu_is_refused(measure):
    with pytest.raises(DeviceError, match="device time needs a GPU, got device cpu"):
        measure(lambda: None, device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_default_device_without_a_gpu_is_refused():
    with pytest.raises(DeviceError, match="needs a GPU"):
        marginal_us(lambda: None)


def sleeping(cycles: int):
    return lambda: torch.cuda._sleep(cycles)


def median(values) -> float:
    return sorted(values)[len(values) // 2]


@pytest.mark.gpu
def test_twice_the_work_takes_twice_the_time_on_a_gpu():
    found = interleaved_us({"one": sleeping(20_000), "two": sleeping(40_000)}, counts=(10, 30))
    added = median(found["two"]) - median(found["one"])
    assert 5 < added < 40
    assert median(found["two"]) == pytest.approx(2 * median(found["one"]), rel=0.15)


@pytest.mark.gpu
def test_cold_caches_cost_and_the_flush_is_taken_off():
    table = torch.zeros(4 * 2**20, dtype=torch.int32, device="cuda")  # 16 MiB: fits the cache, takes time without it
    out = torch.empty_like(table)
    hot, cold = (median(marginal_us(lambda: out.copy_(table), cold=cold)) for cold in (False, True))
    assert 1.05 * hot < cold < 10 * hot


@pytest.mark.gpu
def test_host_gaps_do_not_count_and_a_body_that_waits_is_told():
    x = torch.zeros(1024, device="cuda")
    chain = eager_device_us(lambda: [x.add_(1) for _ in range(20)])
    assert chain.status == "ok"
    assert median(chain) < 20 * 6  # dispatching one takes the host longer
    waiting = eager_device_us(lambda: x.sum().item())
    assert (waiting.status, list(waiting)) == ("unsupported", [])


@pytest.mark.gpu
def test_what_a_graph_cannot_hold_is_a_capture_error():
    x = torch.zeros(8, device="cuda")
    with pytest.raises(CaptureError):
        marginal_us(lambda: x.sum().item())
    assert median(marginal_us(lambda: x.add_(1))) > 0
