"""The private or moving APIs of torch that _compat.py uses, one contract each.  Run with every torch we support."""

from __future__ import annotations

import functools
import inspect

import pytest
import torch

from graphopt import _compat, _compat_capture, _compat_tensors


def test_inductor_compile_takes_options_by_keyword() -> None:
    import torch._inductor

    assert list(inspect.signature(torch._inductor.compile).parameters)[:3] == ["gm", "example_inputs", "options"]


def test_default_store_keeps_values_and_waits(tmp_path) -> None:
    from datetime import timedelta

    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/init", rank=0, world_size=1)
    try:
        store = _compat.default_store()
        store.set("a", "1")
        store.wait(["a"], timedelta(seconds=1))
        assert store.get("a") == b"1"
        assert store.check(["a"])
        assert not store.check(["b"])
        assert store.add("n", 1) == 1
        assert store.add("n", 0) == 1
        with pytest.raises((RuntimeError, dist.DistError)):
            store.wait(["b"], timedelta(milliseconds=200))
    finally:
        dist.destroy_process_group()


def test_modes_and_options() -> None:
    assert {"default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"} <= set(_compat.inductor_mode_names())
    assert _compat.inductor_mode_options("max-autotune-no-cudagraphs")["max_autotune"] is True
    assert "max_autotune" in _compat.inductor_option_names()


def test_cudagraphs() -> None:
    assert not _compat.uses_cudagraphs({})
    assert _compat.uses_cudagraphs(_compat.inductor_mode_options("reduce-overhead"))
    assert not _compat.uses_cudagraphs(_compat.inductor_mode_options("max-autotune-no-cudagraphs"))


def test_mix_order_key_exists_where_it_is_wrong() -> None:
    version = tuple(int(v) for v in torch.__version__.split("+")[0].split(".")[:2])
    if version >= (2, 10):
        assert _compat.mix_order_is_wrong()
        assert torch._inductor.config.triton.mix_order_reduction in (True, False)


@pytest.mark.parametrize("dynamic", [False, True])
def test_options_reach_the_backward(dynamic: bool, monkeypatch) -> None:
    """The backward is lowered after the call returns: settings must travel with the graph, not in a config context."""
    import torch._inductor.graph

    seen = []
    run = torch._inductor.graph.GraphLowering.run

    def spy(self, *args, **kwargs):
        seen.append((self.is_backward, torch._inductor.config.triton.mix_order_reduction))
        return run(self, *args, **kwargs)

    monkeypatch.setattr(torch._inductor.graph.GraphLowering, "run", spy)

    def f(x, s):
        return torch.nn.functional.layer_norm(x, (8,)) * (1 + s)

    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        step = torch.compile(f, backend="graphopt", dynamic=dynamic)
        step(torch.randn(3, 8, requires_grad=True), torch.randn(1, 8, requires_grad=True)).sum().backward()
    assert (True, False) in seen, seen
    assert all(mix is False for _, mix in seen), seen
    assert torch._inductor.config.triton.mix_order_reduction is True, "the process-wide setting was touched"


def test_wrapper_is_found_from_both_sides() -> None:
    seen = []

    def backend(gm, inputs, **kwargs):
        seen.append((_compat.calling_wrapper(), _compat.compiling_code(), _compat.current_compile_id(),
                     _compat.current_attempt()))
        return gm.forward

    class Doubled(torch.nn.Module):
        def forward(self, x):
            return x * 2

    module, in_place, by_forward = Doubled(), Doubled(), Doubled()
    in_place.compile(backend=backend, options={"a": 1})
    by_forward.forward = torch.compile(by_forward.forward, backend=backend, options={"b": 2})
    part = functools.partial(torch.compile(lambda n, x: n * x, backend=backend), 2)
    for f, code in ((torch.compile(module, backend=backend), Doubled.forward.__code__),
                    (in_place, None), (by_forward, Doubled.forward.__code__), (part, None),
                    (torch.compile(lambda x: x + 1, backend=backend), None)):
        f(torch.ones(1, 2))
        owner, compiling, compile_id, attempt = seen[-1]
        assert type(owner).__name__ == "_TorchCompileWrapper"
        assert _compat.wrapper_of(f) is owner
        assert "/" in compile_id
        assert attempt == 0
        if code is not None:
            assert compiling is code
            assert _compat.code_of(f) is code
            assert _compat.has_compiled_code(code)
    torch._dynamo.reset()
    assert not _compat.has_compiled_code(Doubled.forward.__code__)


def test_sizes() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())
    fake = mode.from_tensor(torch.randn(3, 4), static_shapes=False)
    assert _compat.size_hint(fake.shape[0]) == 3
    assert _compat.size_hint(7) == 7
    assert _compat.statically_true(fake.shape[0] == fake.shape[0])
    assert not _compat.statically_true(fake.shape[0] == 3)
    assert _compat.is_fake(fake)
    with _compat.fake_mode_of([fake]):
        assert _compat.is_fake(torch.zeros(2))


def test_named_backend() -> None:
    assert callable(_compat.named_backend("aot_eager"))


def test_frames_breaks_limit_and_stance() -> None:
    def looped(x):
        for _ in range(2):
            torch._dynamo.graph_break()
        return x

    def broken(x):
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    for f in (looped, broken):
        torch.compile(f, backend="eager")(torch.ones(2))
    assert _compat.compiling_is_off() is None
    attempts = {a.name: a for a in _compat.frame_attempts()}
    first = looped.__code__.co_firstlineno
    assert (attempts["looped"].file, attempts["looped"].line) == (__file__, first)
    assert attempts["looped"].place == f"{__file__}:{first + 2}"
    assert attempts["looped"].failed.startswith("Call to `torch._dynamo.graph_break()`")
    assert (attempts["broken"].failed, attempts["broken"].ops) == (None, 1)
    (reason, stack), = _compat.graph_breaks()
    assert reason.startswith("Call to `torch._dynamo.graph_break()`")
    assert stack[-1][:2] == (__file__, broken.__code__.co_firstlineno + 2)
    torch._dynamo.utils.counters.clear()
    assert _compat.recompile_limit(broken.__code__) is None
    with torch._dynamo.config.patch(recompile_limit=1):
        torch.compile(broken, backend="eager")(torch.ones(2, dtype=torch.float64))
        assert _compat.recompile_limit(broken.__code__) == 1
        assert _compat.recompile_limit(looped.__code__) is None
    with torch.compiler.set_stance("force_eager"):
        assert "set_stance" in _compat.compiling_is_off()
    torch._dynamo.reset()
    torch.compile(broken, backend="eager")(torch.ones(3))
    assert "looped" not in {a.name for a in _compat.frame_attempts()}


def test_forward_mode_ad() -> None:
    assert _compat.forward_mode_ad() is None
    x = torch.ones(2)
    with torch.autograd.forward_ad.dual_level():
        assert _compat.forward_mode_ad() == "forward-mode AD"
        assert not _compat.has_tangent((x, 3))
        assert _compat.has_tangent((x, torch.autograd.forward_ad.make_dual(x, x)))
    assert not _compat.has_tangent((x,))


def test_sizes_stay_apart_and_are_written_with_known_functions() -> None:
    import sympy

    seen = []

    def backend(gm, inputs):
        seen.extend(n.meta["example_value"] for n in gm.graph.nodes if n.op == "placeholder")
        return gm.forward

    with _compat.every_size_its_own_symbol():
        torch.compile(lambda x: x.flatten() + 1, backend=backend, dynamic=True)(torch.randn(6, 6))
    symbols = {s.node.expr for s in seen if isinstance(s, torch.SymInt)}
    assert len(symbols) == 2
    floor_div, maximum = _compat.floor_div_and_max()
    assert floor_div(sympy.Integer(7), sympy.Integer(2)) == 3
    assert maximum(sympy.Integer(7), sympy.Integer(2)) == 7


def test_aot_autograd_hands_over_the_joint_graph() -> None:
    from functorch.compile import default_partition

    joints = []

    def partition(joint, inputs, *, num_fwd_outputs, **options):
        joints.append(len(joint.graph.nodes))
        return default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)

    keep = lambda gm, inputs: gm.forward
    f = torch.compile(lambda x: x.sin().cos(), backend=_compat.aot_autograd(keep, keep, partition))
    f(torch.randn(3, requires_grad=True)).sum().backward()
    assert len(joints) == 1


def test_post_grad_pass_runs_on_both_graphs_and_keys_the_cache() -> None:
    """Inductor calls the pass of its option on the forward and on the backward, then the user's own."""
    seen: list[str] = []

    def ours(graph) -> None:
        seen.append("ours")

    def theirs(graph) -> None:
        seen.append("theirs")

    make = _compat.post_grad_pass
    assert make(ours, "1").uuid() != make(ours, "2").uuid()
    assert make(ours, "1", theirs).uuid() is None  # a plain callable has no version: not cached
    options = {_compat.POST_GRAD: make(ours, "contract", theirs)}
    f = torch.compile(lambda x, w: (x @ w).sin().sum(), options=options)
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 4, requires_grad=True)
    f(x, w).backward()
    assert seen == ["ours", "theirs"] * 2


def test_artifacts_reach_the_structured_trace(tmp_path) -> None:
    """What TORCH_TRACE writes and tlparse reads: one artifact a graph, under its compile id."""
    import json
    import os
    import subprocess
    import sys

    code = ("import torch, torch.nn.functional as F\n"
            "f = lambda x, s, b: F.layer_norm(x, (8,)) * (1 + s) + b\n"
            "torch.compile(f, backend='graphopt', options={'graphopt.compiler': 'eager'})"
            "(torch.ones(2, 20, 8), torch.ones(2, 1, 8), torch.ones(2, 1, 8))\n")
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"TORCH_TRACE": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (log,) = tmp_path.iterdir()
    lines = log.read_text().splitlines()
    (at,) = [i for i, line in enumerate(lines) if '"graphopt_report"' in line]
    head = json.loads(lines[at][lines[at].index("{"):])
    assert head["artifact"] == {"name": "graphopt_report", "encoding": "json"}
    assert head["frame_id"] == 0
    payload = json.loads(lines[at + 1].strip())
    assert payload["passes"][-1]["sites"][0]["kind"] == "modulate"


def test_inductor_cache_folder() -> None:
    assert "inductor" in _compat.inductor_cache_folder()


def test_values_of_inputs_and_graph_breaks() -> None:
    seen = []

    def backend(gm, inputs):
        seen.append((_compat_capture.real_inputs(gm), _compat_capture.break_of(gm)))
        return gm.forward

    def f(x, w):
        y = x + w
        torch._dynamo.graph_break()
        return y * 2

    x, w = torch.randn(3), torch.randn(3)
    met = _compat_capture.GraphBreaks()
    torch.compile(f, backend=backend)(x, w)
    (values, ended), (_, last) = seen
    assert {id(v) for v in values} == {id(x), id(w)}
    assert "graph_break" in ended[0]
    assert ended[1].startswith(__file__)
    assert last is None
    assert met.found() == [ended]
    assert _compat_capture.GraphBreaks().found() == []

    def loop(x):
        for _ in range(2):
            torch._dynamo.graph_break()
        return x

    met = _compat_capture.GraphBreaks()
    torch.compile(loop, backend=backend)(x)
    assert any("runs loop uncompiled" in reason for reason, _ in met.found())


def test_capture_settings_are_put_back() -> None:
    from torch._dynamo import config
    from torch._subclasses import fake_tensor

    before = fake_tensor.FakeTensorMode.__init__, config.recompile_limit
    with _compat_capture.capture_settings():
        assert config.recompile_limit > 1000
        f = torch.compile(lambda x: torch.where(x > 0, x, torch.as_tensor(3.0, device=x.device)), backend="eager")
        assert f(torch.empty(2, device="meta")).device.type == "meta"
    assert (fake_tensor.FakeTensorMode.__init__, config.recompile_limit) == before


def test_disabled_and_error_lines() -> None:
    assert _compat_capture.is_disabled(torch.compiler.disable(lambda x: x))
    assert not _compat_capture.is_disabled(torch.nn.Linear(2, 2))
    with pytest.raises(Exception, match="mat") as caught:
        torch.compile(lambda x: x @ torch.ones(3, 3), backend="eager")(torch.ones(2, 2))
    assert _compat_capture.error_line(caught.value).startswith(__file__)


def test_graphs_call_the_overload_of_a_custom_operator() -> None:
    @torch.library.custom_op("graphopt_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    assert _compat.graph_target(twice) is torch.ops.graphopt_tests.twice.default
    assert _compat.graph_target(torch.sin) is torch.sin


def test_containers_foreach_and_subclasses() -> None:
    tree = {"a": [1, 2], "b": (3,)}
    assert _compat.tree_map(lambda x: x + 1, tree) == {"a": [2, 3], "b": (4,)}
    assert _compat.tree_leaves(tree) == [1, 2, 3]
    into, sources = [torch.zeros(3), torch.zeros(2, dtype=torch.bfloat16)], [torch.randn(3), torch.full((2,), 3.0)]
    _compat_tensors.foreach_copy(into, sources)
    assert torch.equal(into[0], sources[0])
    assert into[1].tolist() == [3.0, 3.0]
    norms = _compat_tensors.foreach_norm([torch.tensor([3.0, 4.0], dtype=torch.bfloat16)])
    assert norms[0].dtype == torch.float32
    assert norms[0].item() == 5.0

    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise AssertionError("called")

    with _compat_tensors.without_torch_function():
        assert Loud(torch.ones(2)).sum().item() == 2.0


def test_wrapped_tensors_and_operators() -> None:
    seen = []
    torch.func.vmap(lambda x: seen.append(_compat_tensors.is_wrapped(x)) or x)(torch.ones(2, 3))
    assert seen == [True]
    assert not _compat_tensors.is_wrapped(torch.ones(2))
    assert isinstance(torch.ops.aten.mm.default, _compat.OpOverload)
    assert isinstance(torch.ops.higher_order.cond, _compat.HigherOrderOperator)


def test_a_backward_has_a_number_and_an_end() -> None:
    from graphopt import _compat_capture

    seen: list[object] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda g: seen.append(_compat_capture.backward_id()))
    y.register_hook(lambda g: _compat_capture.after_backward(lambda: seen.append(x.grad is not None)))
    assert _compat_capture.backward_id() == -1
    y.sum().backward(retain_graph=True)
    assert len(seen) == 2
    assert seen[0] >= 0
    assert seen[1] is True, "called before the gradients were there"
    y.sum().backward()
    assert seen[2] != seen[0]


def test_a_node_knows_whether_the_running_backward_will_execute_it() -> None:
    seen = []

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx, number, spark, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            seen.append(_compat_capture.runs_in_this_backward(ctx.next_functions[0][0]))
            return None, None, g * 2

    spark, x = torch.zeros((), requires_grad=True), torch.ones(2, requires_grad=True)
    Node.apply(3, spark, x).sum().backward()
    torch.autograd.grad(Node.apply(3, spark, x).sum(), x)
    Node.apply(3, spark, x).sum().backward(inputs=[x])
    assert seen == [True, False, False]
