from __future__ import annotations

import sys

import pytest
import torch

from graphopt import _factories
from graphopt.errors import ConfigError
from graphopt.schedule.builtin import BUILTIN

# parameters in 1e9, as the models' own pages state them, to the digits they give
SIZES = {
    "wan-1.3b": (1.42, 0.01), "wan-14b": (14.29, 0.01), "hunyuan-video": (12.82, 0.1), "cogvideox-5b": (5.57, 0.05),
    "ltx-video": (1.92, 0.05), "mochi": (10.03, 0.05), "flux-dev": (11.90, 0.01), "sd3.5-large": (8.06, 0.05),
    "sd3.5-medium": (2.24, 0.3), "latte": (1.06, 0.05), "pixart": (0.61, 0.01), "qwen-image": (20.43, 0.05),
}


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_built_in_models_have_their_real_size_and_no_weights(name: str) -> None:
    made = _factories.make(name)
    billions, slack = SIZES[name]
    parameters = list(made.model.parameters())
    assert sum(p.numel() for p in parameters) / 1e9 == pytest.approx(billions, abs=slack)
    assert {p.device.type for p in parameters} == {"meta"}
    assert torch.bfloat16 in {p.dtype for p in parameters}
    assert made.model.training


def test_modules_that_stay_in_fp32() -> None:
    model = _factories.make("wan-1.3b").model
    assert model.blocks[0].scale_shift_table.dtype == torch.float32
    assert model.blocks[0].norm2.weight.dtype == torch.float32
    assert model.blocks[0].attn1.to_q.weight.dtype == torch.bfloat16


def test_sizes_reach_the_inputs() -> None:
    made = _factories.make("wan-14b", {"frames": 17, "height": 96, "width": 64, "batch": 3, "text": 9})
    assert made.kwargs["hidden_states"].shape == (3, 16, 5, 12, 8)
    assert made.kwargs["encoder_hidden_states"].shape == (3, 9, 4096)
    assert "frames=17" in made.title
    assert _factories.make("flux-dev", {"height": 512}).kwargs["hidden_states"].shape == (1, 2048, 64)
    assert _factories.make("ltx-video", {"frames": 9}).kwargs["num_frames"] == 2


@pytest.mark.parametrize(("name", "sizes", "message"), [
    ("wan-14", {}, "did you mean 'wan-14b'"),
    ("nonsense", {}, "package.module:factory"),
    ("wan-14b", {"heigth": 480}, "did you mean 'height'"),
    ("wan-14b", {"height": 481}, "a multiple of 16"),
    ("wan-14b", {"frames": 80}, r"1 \+ a multiple of 4"),
    ("wan-14b", {"batch": 0}, "below 1"),
    ("flux-dev", {"frames": 9}, "fixed by its architecture"),
])
def test_bad_names_and_sizes(name, sizes, message) -> None:
    with pytest.raises(ConfigError, match=message):
        _factories.make(name, sizes)


@pytest.mark.parametrize(("text", "message"), [("height", "name=number"), ("height=x", "name=number"), ("=3", "name=number")])
def test_bad_shapes(text, message) -> None:
    with pytest.raises(ConfigError, match=message):
        _factories.parse_shape([text])
    assert _factories.parse_shape(["a=1,b=2", "c=3"]) == {"a": 1, "b": 2, "c": 3}


MODULE = '''
import torch
def good(width=8):
    return torch.nn.Linear(width, width), {"input": torch.ones(2, width)}
def one(): return torch.nn.Linear(3, 3), torch.ones(2, 3)
def raises(): raise ValueError("no weights here")
def wrong(): return torch.nn.Linear(3, 3)
number = 3
'''


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "their_models.py").write_text(MODULE)
    (tmp_path / "their_broken.py").write_text("import nothing_of_that_name")
    (tmp_path / "their_syntax.py").write_text("def f(:")
    monkeypatch.chdir(tmp_path)
    yield
    for name in ("their_models", "their_broken", "their_syntax"):
        sys.modules.pop(name, None)
    sys.path[:] = [p for p in sys.path if p != str(tmp_path)]


def test_a_factory_of_the_user(module) -> None:
    made = _factories.make("their_models:good", {"width": 5})
    assert made.kwargs["input"].shape == (2, 5)
    assert made.model.weight.device.type == "meta"
    assert _factories.make("their_models:one").args[0].shape == (2, 3)


@pytest.mark.parametrize(("name", "sizes", "message"), [
    ("their_models:god", {}, "did you mean 'good'"),
    ("their_models:number", {}, "not callable"),
    ("their_models:good", {"depth": 3}, "cannot be called"),
    ("their_models:raises", {}, r"ValueError: no weights here[\s\S]*their_models.py:6"),
    ("their_models:wrong", {}, "returned Linear"),
    ("no_such_module:f", {}, "there is no module 'no_such_module'"),
    ("their_broken:f", {}, "needs 'nothing_of_that_name'"),
    ("their_syntax:f", {}, "SyntaxError"),
])
def test_bad_factories(module, name, sizes, message) -> None:
    with pytest.raises(ConfigError, match=message):
        _factories.make(name, sizes)
