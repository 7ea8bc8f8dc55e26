from __future__ import annotations

import pytest
import torch

from graphopt import _compat, config
from graphopt.errors import ConfigError, unwrap


def test_defaults_and_inductor_options() -> None:
    parsed, inductor = config.parse(None, {"max_autotune": True})
    assert parsed == config.Config()
    assert inductor == {"max_autotune": True, _compat.MIX_ORDER: False}


def test_options_win_over_environment_over_configure(monkeypatch) -> None:
    config.configure(select="all", on_error="fallback", rules=["norm_modulate"])
    monkeypatch.setenv("GRAPHOPT_DISABLE", "gate_residual, gate_norm")
    monkeypatch.setenv("GRAPHOPT_STRICT", "1")
    parsed, _ = config.parse(None, {"graphopt.select": "profitable"})
    assert parsed.select == "profitable"
    assert parsed.on_error == "raise"
    assert parsed.disable == ("gate_residual", "gate_norm")
    assert parsed.rules == ("norm_modulate",)
    assert config.parse(None, {"graphopt.on_error": "fallback"})[0].on_error == "fallback"


@pytest.mark.parametrize(("options", "nearest"), [
    ({"graphopt.ruls": []}, "graphopt.rules"),
    ({"max_autotun": True}, "max_autotune"),
    ({"rules": []}, "graphopt.rules"),
    ({"graphopt.rules": ["norm_modulat"]}, "norm_modulate"),
    ({"graphopt.mode": "max-autotun"}, "max-autotune"),
])
def test_unknown_names_the_nearest(options, nearest) -> None:
    with pytest.raises(ConfigError, match=nearest.replace(".", r"\.")):
        config.parse(None, options)


@pytest.mark.parametrize("options", [
    {"graphopt.select": "some"}, {"graphopt.rules": "norm_modulate"}, {"graphopt.compiler": "tvm"},
    {"graphopt.numerics": "fp8"}, {"graphopt.on_error": 1}, {"graphopt.rules": 5}, {"graphopt.disable": {"gate_norm": 1}},
    {"max_autotune": "yes"}, {"graphopt.dsa": {"window": (3.5, 7, 7)}}, {"graphopt.dsa": {"window": "377"}},
    {"graphopt.dsa": {"select": 5}}, {"graphopt.dsa": {"keep_dense": "first"}}, {"graphopt.dsa": {"keep_dense": [True]}},
])
def test_bad_values(options) -> None:
    with pytest.raises(ConfigError, match=next(iter(options)).replace(".", r"\.")):
        config.parse(None, options)


@pytest.mark.parametrize("options", [{"max_autotune": True}, {"graphopt.mode": "max-autotune"}, {}])
def test_inductor_keys_need_inductor(options) -> None:
    config.configure(compiler="aot_eager")
    with pytest.raises(ConfigError, match="max.autotune"):
        config.parse(None if options else "max-autotune", options)


def test_names_that_are_no_text() -> None:
    with pytest.raises(ConfigError, match="unknown option 5"):
        config.parse(None, {5: 1})


def test_selections_of_attention() -> None:
    """One name may stand for a list; None is the default."""
    for given in ({"select": None, "keep_dense": None}, {"select": "*", "keep_dense": ()}, {}):
        parsed, _ = config.parse(None, {"graphopt.dsa": given})
        assert (parsed.dsa.select, parsed.dsa.keep_dense) == (("*",), ())
    parsed, _ = config.parse(None, {"graphopt.dsa": {"select": "blocks.*", "keep_dense": -1, "window": torch.Size((3, 5, 5))}})
    assert (parsed.dsa.select, parsed.dsa.keep_dense, parsed.dsa.window) == (("blocks.*",), (-1,), (3, 5, 5))


@pytest.mark.parametrize("options", [{}, {"graphopt.mode": "max-autotune-no-cudagraphs"}])
def test_mode(options) -> None:
    _, inductor = config.parse(None if options else "max-autotune-no-cudagraphs", options)
    assert inductor["max_autotune"] is True
    assert inductor[_compat.MIX_ORDER] is False


def test_the_user_may_switch_mix_order_on() -> None:
    assert config.parse(None, {_compat.MIX_ORDER: True})[1][_compat.MIX_ORDER] is True


def test_bad_environment(monkeypatch) -> None:
    monkeypatch.setenv("GRAPHOPT_DISABLE", "gate_residul")
    with pytest.raises(ConfigError, match="gate_residual"):
        config.parse(None, {})
    monkeypatch.setenv("GRAPHOPT_DISABLE", "")
    monkeypatch.setenv("GRAPHOPT_STRICT", "yes")
    with pytest.raises(ConfigError, match="GRAPHOPT_STRICT"):
        config.parse(None, {})


def test_a_failed_configure_changes_nothing() -> None:
    with pytest.raises(ConfigError):
        config.configure(select="all", numerics="fp8")
    assert config.parse(None, {})[0] == config.Config()


def test_it_reaches_the_user_through_torch() -> None:
    f = torch.compile(lambda x: x + 1, backend="graphopt", options={"graphopt.rulez": []})
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="graphopt.rules") as caught:
        f(torch.ones(2))
    assert isinstance(unwrap(caught.value), ConfigError)


def test_mode_keyword_of_torch_compile() -> None:
    f = torch.compile(lambda x: x + 1, backend="graphopt", mode="reduce-overhead")
    assert torch.equal(f(torch.ones(2)), torch.full((2,), 2.0))


def test_experimental_passes_are_asked_for_by_name() -> None:
    assert config.parse(None, {})[0].experimental == ()
    asked, _ = config.parse(None, {"graphopt.experimental": ["joint_launch"]})
    assert asked.experimental == ("joint_launch",)
    with pytest.raises(ConfigError, match="did you mean 'joint_launch'"):
        config.parse(None, {"graphopt.experimental": ["joint_lunch"]})
    with pytest.raises(ConfigError, match="unknown rule 'gradient_addends'"):
        config.parse(None, {"graphopt.rules": ["gradient_addends"]})


def test_passes_beside_the_sites_run_unless_disabled() -> None:
    from graphopt import backend

    usual = {"norm_rotate", "head_norm_rotate", "column_sums", "gradient_addends", "stack_gradients", "joint_launch"}
    running = lambda **options: backend.beside(config.parse(None, {f"graphopt.{k}": v for k, v in options.items()})[0])
    assert running() == usual
    assert running(disable=["column_sums"]) == usual - {"column_sums"}
    assert running(experimental=["joint_launch"]) == usual | {"joint_launch"}
    assert running(numerics="eager") == set()
    assert running(rules=["norm_modulate"]) == set()
    assert running(verify=True) == usual - {"norm_rotate", "head_norm_rotate"}


def test_the_passes_over_lowered_graphs_in_order() -> None:
    from graphopt import backend

    def run(fused: bool = True, lands: bool = False, **options) -> list[str]:
        parsed, _ = config.parse(None, {f"graphopt.{k}": v for k, v in options.items()})
        return [m.__name__.rpartition(".")[2] for m, _ in backend.late_passes(parsed, fused, lands)]

    usual = ["gradient_addends", "column_sums", "freeing_order", "reuse_gradients", "stack_gradients", "joint_launch"]
    assert run() == usual
    assert run(lands=True) == [*usual, "land_gradients"]
    assert run(fused=False, lands=True) == ["land_gradients"]
    assert run(numerics="eager") == ["freeing_order", "reuse_gradients"]
    assert run(disable=["reuse_gradients", "column_sums"]) == [n for n in usual if n not in ("reuse_gradients", "column_sums")]
    assert run(rules=["norm_modulate"], experimental=["joint_launch"]) == ["freeing_order", "reuse_gradients", "joint_launch"]
