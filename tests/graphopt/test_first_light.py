"""The tiny Wan, FLUX and SD3 of the zoo: every site is found, and output and every gradient stay within the contract."""

from __future__ import annotations

import contract
import pytest
import torch
import zoo
from contract import run

import graphopt

COUNTS = {"wan": (5, 4, 7), "flux": (11, 10, 15), "sd3": (8, 6, 8)}  # modulates, gates, fused operators



def assert_contract(step, model: torch.nn.Module, name: str, dtype: torch.dtype = torch.float32) -> None:
    """See contract.measure."""
    verdict = contract.measure(step, model, contract.fresh_inputs(zoo.ZOO[name], dtype))
    assert verdict.holds, verdict


FP32, BF16 = torch.float32, torch.bfloat16
VARIANTS = [
    pytest.param(name, dtype, dynamic, id=f"{name}-{str(dtype)[6:]}-{'dynamic' if dynamic else 'static'}",
                 marks=[pytest.mark.nightly] if dynamic and dtype == BF16 and name != "wan" else [])
    for name in COUNTS for dtype in (FP32, BF16) for dynamic in (False, True)
]


@pytest.mark.parametrize(("name", "dtype", "dynamic"), VARIANTS)
def test_sites_output_and_gradients(name: str, dtype: torch.dtype, dynamic: bool) -> None:
    model = zoo.ZOO[name].build(dtype)[0].train()
    step = torch.compile(model, backend="graphopt", dynamic=dynamic or None, fullgraph=True,
                         options={"graphopt.select": "all", "graphopt.compiler": "aot_eager"})
    assert_contract(step, model, name, dtype)
    modulates, gates, operators = COUNTS[name]
    report = graphopt.check(step, {"modulate": modulates, "gate": gates}, what="rewritten")
    assert (report.count("modulate"), report.count("gate")) == (modulates, gates)
    assert [k.direction for k in report.kernels].count("forward") == operators
    assert [k.direction for k in report.kernels].count("backward") == operators


@pytest.mark.parametrize(("name", "modulates", "gates"), [
    ("ltx", 5, 4), ("cogvideox", 9, 8), ("mochi", 8, 6), ("sd35", 10, 8),
    *(pytest.param(*row, marks=pytest.mark.nightly) for row in (
        ("hunyuan_video", 11, 12), ("hunyuan_video_i2v", 17, 16), ("wan_ti2v", 5, 4), ("cosmos_per_frame", 7, 6)))])
def test_rms_norms_affine_and_shared_modulation(name: str, modulates: int, gates: int) -> None:
    """LTX writes its RMS norms out, HunyuanVideo has a refiner and (i2v) joined gates, CogVideoX modulates an affine norm,
    Mochi gates normed branches through tanh, SD3.5 modulates one norm twice, Wan TI2V adds a table per token."""
    model = zoo.ZOO[name].build()[0].train()
    step = torch.compile(model, backend="graphopt", options={"graphopt.select": "all", "graphopt.compiler": "aot_eager"})
    assert_contract(step, model, name)
    report = graphopt.check(step, {"modulate": modulates, "gate": gates}, what="rewritten")
    assert (report.count("modulate"), report.count("gate")) == (modulates, gates)


def test_gradients_are_repeatable() -> None:
    model, inputs = zoo.ZOO["wan"].build(torch.bfloat16)
    step = torch.compile(model.train(), backend="graphopt",
                         options={"graphopt.select": "all", "graphopt.compiler": "aot_eager"})
    first, second = run(step, model, inputs), run(step, model, inputs)
    assert all(torch.equal(first[n], second[n]) for n in first)


def one_block(name: str) -> tuple[torch.nn.Module, list[torch.nn.Module]]:
    """A model cut to its last block of each family (SD3's last has no context branch), and these blocks."""
    model = zoo.ZOO[name].build()[0].train()
    kinds = [k for k in ("blocks", "transformer_blocks", "single_transformer_blocks") if hasattr(model, k)]
    for kind in kinds:
        setattr(model, kind, getattr(model, kind)[-1:])
    return model, [getattr(model, kind)[0] for kind in kinds]


@pytest.mark.parametrize(("name", "modulates", "gates"), [("wan", 2, 2), ("flux", 5, 5), ("sd3", 3, 2)])
def test_one_block_through_inductor(name: str, modulates: int, gates: int) -> None:
    """The whole way on this machine: reference operators inside Inductor's C++ code, within the contract."""
    model, blocks = one_block(name)
    options = {"graphopt.select": "all"}
    compiled = [torch.compile(block.forward, backend="graphopt", options=options) for block in blocks]

    def step(*args, **kwargs):
        for block, forward in zip(blocks, compiled, strict=True):
            block.forward = forward
        try:
            return model(*args, **kwargs)
        finally:
            for block in blocks:
                del block.forward

    ours = contract.measure(step, model, contract.fresh_inputs(zoo.ZOO[name]), most=16)
    reports = [graphopt.report(forward) for forward in compiled]
    counts = [sum(r.count(kind, "rewritten") for r in reports) for kind in ("modulate", "gate")]
    assert counts == [modulates, gates]
    assert ours.mean <= contract.MEAN, ours
    assert max(ours.ratios.values()) <= contract.MOST, ours


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["wan", "flux", "sd3"])
def test_a_model_through_inductor_is_as_exact_as_without_graphopt(name: str) -> None:
    """Inductor's sines and cosines of a whole model's time tables differ from eager's, which the contract takes for given."""
    model, _blocks = one_block(name)
    step = torch.compile(model, backend="graphopt", options={"graphopt.select": "all"})
    ours = contract.measure(step, model, contract.fresh_inputs(zoo.ZOO[name]), most=8)
    torch._dynamo.reset()
    plain = torch.compile(model, backend="inductor")
    alone = contract.measure(plain, model, contract.fresh_inputs(zoo.ZOO[name]), least=ours.batches, most=ours.batches)
    assert ours.mean <= contract.MEAN * alone.mean, (ours, alone)
    assert all(ours.ratios[n] <= contract.MOST * max(1.0, alone.ratios[n]) for n in ours.ratios), (ours, alone)


def test_inference_and_no_grad() -> None:
    model, inputs = zoo.ZOO["sd3"].build()
    options = {"graphopt.select": "all", "graphopt.compiler": "aot_eager"}
    step = torch.compile(model, backend="graphopt", options=options)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            want, got = model(**inputs, return_dict=False)[0], step(**inputs, return_dict=False)[0]
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    report = graphopt.report(step)
    assert report.count("modulate", "rewritten") >= 8
    assert {k.direction for k in report.kernels} == {"forward"}


def test_profitable_declines_off_a_gpu() -> None:
    model, inputs = zoo.ZOO["sd3"].build()
    step = torch.compile(model, backend="graphopt", options={"graphopt.compiler": "aot_eager"})
    with torch.no_grad():
        got = step(**inputs, return_dict=False)[0]
        assert torch.equal(got, model(**inputs, return_dict=False)[0])
    report = graphopt.report(step)
    assert (report.count("modulate"), report.count("modulate", "rewritten")) == (8, 0)
    assert len(report.declined) == 14
    assert "Inductor is faster" in report.declined[0].reason
