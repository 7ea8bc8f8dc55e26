"""Recorded layers: what is replayed, from which addresses, and what must not be.  On a CPU a replay runs the same code
into the same results, so a buffer that is not filled, or a result that is not copied out, shows."""

from __future__ import annotations

import copy

import pytest
import torch
from resident import OPTIONS, differing, jitter, loss_of, train
from tiny_dit import TinyDiT, inputs

import graphopt
from graphopt.errors import ConfigError
from graphopt.streaming import attach, replay
from graphopt.streaming.link import CpuLink, LateLink


def pair(graphs="on", slots=2, link=None, resident=(), **settings):
    """A model launched plainly, and its twin by graphs: (optimizer, step, model) of both."""
    made = []
    model = TinyDiT(**settings).train()
    for mode in ("off", graphs):
        m = copy.deepcopy(model)
        graphopt.stream(m, "cpu", slots=slots, resident=resident, graphs=mode, link=link() if link else None)
        opt = graphopt.HostAdamW(m.parameters(), lr=1e-2, kernel="torch")
        made.append((opt, torch.compile(m, backend="graphopt", options=OPTIONS), m))
    return made


def equal(a, b) -> None:
    assert differing(dict(a.state_dict()), dict(b.state_dict())) == {}


@pytest.mark.parametrize("link", [lambda: LateLink(1), pytest.param(None, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(("slots", "resident"), [(2, ["blocks.0", "blocks.2"]), pytest.param(1, (), marks=pytest.mark.nightly)])
def test_replays_change_nothing(slots, resident, link) -> None:
    (opt, step, a), (opt2, step2, b) = pair(slots=slots, link=link, resident=resident)
    x = inputs()
    assert train(step2, opt2, x, micro=2) == train(step, opt, x, micro=2)
    equal(a, b)
    replays = attach.engine_of(b).replays
    # a forward per slot, a backward per slot and slab
    assert 2 * (slots + len(resident)) <= replays.recorded <= 3 * slots + 2 * len(resident)
    assert replays.replayed == 2 * (2 * 5 * 4 - replay.WARM)
    assert attach.engine_of(a).replays.replayed == 0


def test_results_outlive_the_next_replay() -> None:
    (opt, step, a), (opt2, step2, b) = pair(order=[0, 1, 0, 1, 2, 3])
    x = inputs()
    for i in range(3):
        one, two = jitter(x, i), jitter(x, 50 + i)
        for m in (step, step2):
            (loss_of(m, one) * loss_of(m, two)).backward()
        for p, q in zip(a.parameters(), b.parameters()):
            assert torch.equal(opt.gradient(p), opt2.gradient(q))
        opt.zero_grad(), opt2.zero_grad()
    assert attach.engine_of(b).replays.replayed > 20


def test_lengths_and_validation_have_graphs_of_their_own() -> None:
    (opt, step, a), (opt2, step2, b) = pair()
    for i, S in enumerate((6, 9, 6)):
        x = inputs(S=S)
        assert train(step, opt, x, steps=1, start=i) == train(step2, opt2, x, steps=1, start=i)
        with torch.no_grad():
            assert torch.equal(step(*x), step2(*x))
    equal(a, b)
    assert attach.engine_of(b).replays.replayed > 0
    assert attach.engine_of(b).replays.run("code", [], [torch.ones(2).mul(1)], lambda given: given) is None
    with torch.inference_mode():
        assert attach.engine_of(b).replays.run("code", [], [torch.ones(2)], lambda given: given) is None


def test_another_ring_forgets_the_graphs() -> None:
    (opt, step, a), (opt2, step2, b) = pair()
    train(step, opt, inputs()), train(step2, opt2, inputs())
    engine = attach.engine_of(b)
    engine.set_slots(3)
    assert engine.replays.recorded == 0
    attach.engine_of(a).set_slots(3)
    assert train(step, opt, inputs(), start=5) == train(step2, opt2, inputs(), start=5)
    assert 6 <= engine.replays.recorded <= 9
    equal(a, b)


def test_dropout_and_autocast_are_launched_plainly() -> None:
    (opt, step, _), (opt2, step2, b) = pair(dropout=0.4)
    torch.manual_seed(1)
    want = train(step, opt, inputs())
    torch.manual_seed(1)
    assert train(step2, opt2, inputs()) == want
    assert attach.engine_of(b).replays.replayed == 0
    _, (opt2, step2, b) = pair()
    with torch.autocast("cpu", torch.bfloat16):
        train(step2, opt2, inputs())
    assert attach.engine_of(b).replays.replayed == 0


@pytest.mark.parametrize("error", [RuntimeError("operation not permitted"), RuntimeError(),
                                   torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")])
def test_what_cannot_be_recorded_runs_plainly_with_one_warning(caplog, monkeypatch, error) -> None:
    def refuse(self, work, pool):
        raise error

    monkeypatch.setattr(CpuLink, "record", refuse)
    (opt, step, a), (opt2, step2, b) = pair()
    with caplog.at_level("WARNING"):
        assert train(step2, opt2, inputs()) == train(step, opt, inputs())
    assert caplog.text.count("cannot be recorded as a CUDA graph") == 1
    assert attach.engine_of(b).replays.mode == "off"
    equal(a, b)


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: an illegal memory access was encountered"),
                                   RuntimeError("the captured image cannot be multiplied"),
                                   RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)")])
def test_other_errors_of_a_layer_are_raised(error) -> None:
    replays = replay.Replays(CpuLink(), "on")

    def work(given):
        if seen:
            raise error
        return [given[0] * 2]

    seen: list[int] = []
    for _ in range(replay.WARM):
        assert replays.run("code", [], [torch.ones(2)], work) is None
    seen.append(1)
    with pytest.raises(RuntimeError, match="illegal|multiplied"):
        replays.run("code", [], [torch.ones(2)], work)
    assert replays.mode == "on"


def test_a_layer_that_writes_into_its_inputs_is_not_recorded(caplog) -> None:
    replays = replay.Replays(CpuLink(), "on")
    x, w = torch.ones(3), torch.ones(2)
    work = lambda given: [given[0].add_(1)]
    with caplog.at_level("WARNING"):
        results = [replays.run("code", [w], [x], work) for _ in range(replay.WARM + 2)]
    assert results == [None] * len(results)
    assert "writes into its inputs" in caplog.text
    assert replays.recorded == 0


def test_inputs_that_come_again_are_copied_once(monkeypatch) -> None:
    replays = replay.Replays(CpuLink(), "on")
    copies = []
    once = replay._once
    monkeypatch.setattr(replay, "_once", lambda t: copies.append(t) or once(t))
    row, w = torch.ones(4), torch.ones(2)
    same = row.expand(2, 4)
    work = lambda given: [given[0] * given[1] + given[2]]
    for i in range(replay.WARM + 6):
        other = torch.full((2, 4), float(i))
        found = replays.run("code", [w], [same, other, 3], work)
        if found is not None:
            assert torch.equal(found[0], same * other + 3)
        copies_of_same = sum(c is same for c in copies)
    assert copies_of_same == 2, "once to know it, once to hold it"
    row.mul_(5)  # in place: known by its version
    found = replays.run("code", [w], [same, other, 3], work)
    assert torch.equal(found[0], same * other + 3)
    assert len(replays._graphs) == 1


def test_too_many_shapes_are_launched_plainly() -> None:
    replays = replay.Replays(CpuLink(), "on")
    for n in range(replay.SIGNATURES + 5):
        for _ in range(replay.WARM + 1):
            replays.run("code", [], [torch.ones(n + 1)], lambda given: [given[0] * 2])
    assert replays.recorded == replay.SIGNATURES


def test_auto_waits_until_the_device_runs_dry() -> None:
    replays = replay.Replays(CpuLink(), "auto")
    for i in range(4 * replay.RECENT):
        replays.launching(dry=i % 2 == 0)
    assert not replays.active, "half of the launches come in time"
    for _ in range(2):
        replays.launching(dry=True)
    assert replays.active
    replays = replay.Replays(CpuLink(), "off")
    for _ in range(2 * replay.RECENT):
        replays.launching(dry=True)
    assert not replays.active


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="graphs is 'always'"):
        graphopt.stream(TinyDiT(), "cpu", graphs="always")
