"""Activations on the host: the same numbers, every byte there and back once, one block ahead of need."""

import pytest
import recompute_jobs as jobs
import torch

import lindos
from lindos.memory.frame import Frame
from lindos.memory.saved import saved_bytes


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_what_blocks_keep_moves_to_the_host(ranks, tp, recompute):
    def run(home):
        plugin = lindos.HybridParallel(tp=tp, recompute=recompute, activations=home)
        return ranks.run(jobs.saved, tp, plugin, "llama", {}, [(2, 12), (3, 12)])

    for device, host in zip(run("device"), run("host")):
        (small, none), (large, _) = device
        (outside, moved), (still, more) = host
        assert none == 0
        assert more - moved == large - small  # what a layer keeps is on the host ...
        assert still == outside  # ... and no longer on the device
        assert moved > 0


def test_numbers_are_bit_equal_and_each_byte_moves_once(ranks):
    plans = [lindos.HybridParallel(tp=2, activations=home) for home in ("device", "host")]
    one, other = (ranks.run(jobs.trained, 2, plan, "mixtral", {})[0] for plan in plans)
    for way in ("step", "loop"):
        assert one[way]["losses"] == other[way]["losses"]
        assert all(torch.equal(x, other[way]["weights"][n]) for n, x in one[way]["weights"].items())

    config = jobs.config_of("llama", {}, layers=3)
    booster, model, _ = jobs.boosted(lindos.DDP(activations="host"), config)
    homes = booster._plan.recompute.homes
    with saved_bytes(model.parameters()) as counted:
        loss = model(**jobs.joined_batch(config, 0)).loss
    assert homes.evicted_bytes == counted.host_bytes > 0
    assert homes.fetched_bytes == 0
    booster.backward(loss)
    assert homes.fetched_bytes == homes.evicted_bytes
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    assert all(away.count_bytes < parameters for away in homes._away.values())


def test_a_block_is_fetched_when_the_one_after_it_begins_its_backward(monkeypatch):
    events = []
    begin = Frame.begin
    monkeypatch.setattr(Frame, "begin", lambda self: (events.append(("fetch", self.name)), begin(self))[1])
    unpack = Frame.unpack

    def unpacked(self, index):
        value = unpack(self, index)
        if ("backward", self.name) not in events:
            events.append(("backward", self.name))
        return value

    monkeypatch.setattr(Frame, "unpack", unpacked)
    config = jobs.config_of("llama", {}, layers=3)
    booster, *_ = jobs.boosted(lindos.DDP(activations="host"), config)
    booster.step(jobs.joined_batch(config, 0))
    first = list(dict.fromkeys(events))
    names = [f"model.layers.{i}" for i in (2, 1, 0)]
    wanted = [("fetch", names[0]), ("fetch", names[1]), ("backward", names[0])]
    wanted += [("fetch", names[2]), ("backward", names[1]), ("backward", names[2])]
    assert first == wanted


def test_proven_against_one_process(ranks):
    report = lindos.prove(type="qwen3", tp=2, activations="host", recompute="selective", micro_batches=2, ranks=ranks)
    assert report.verdict == "equal", report
