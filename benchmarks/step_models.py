"""The models of benchmarks/step.py: classes of diffusers at their real widths, a few layers, random weights.

A model is a builder and the inputs of one forward; sizes are token grids.  Modules that a class keeps in fp32 stay so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

WAN = dict(in_channels=16, out_channels=16, freq_dim=256, text_dim=4096, rope_max_seq_len=1024)
CONFIGS: dict[str, dict[str, Any]] = {
    "wan-1.3b": dict(WAN, num_attention_heads=12, attention_head_dim=128, ffn_dim=8960, num_layers=4),
    "wan-14b": dict(WAN, num_attention_heads=40, attention_head_dim=128, ffn_dim=13824, num_layers=2),
    "flux-dev": dict(num_layers=2, num_single_layers=4, guidance_embeds=True),
    "sd3.5-large": dict(num_layers=4, num_attention_heads=38, attention_head_dim=64, caption_projection_dim=2432,
                        joint_attention_dim=4096, pooled_projection_dim=2048, pos_embed_max_size=192,
                        qk_norm="rms_norm"),
    "sd3.5-medium": dict(num_layers=4, num_attention_heads=24, attention_head_dim=64, caption_projection_dim=1536,
                         joint_attention_dim=4096, pooled_projection_dim=2048, pos_embed_max_size=384,
                         qk_norm="rms_norm", dual_attention_layers=(0, 1, 2, 3)),
    "hunyuan-video": dict(num_layers=2, num_single_layers=2),
}
CLASSES = {"wan-1.3b": "WanTransformer3DModel", "wan-14b": "WanTransformer3DModel",
           "flux-dev": "FluxTransformer2DModel", "sd3.5-large": "SD3Transformer2DModel",
           "sd3.5-medium": "SD3Transformer2DModel", "hunyuan-video": "HunyuanVideoTransformer3DModel"}


@dataclass(frozen=True)
class Size:
    """Batch and token grid [T, H, W] of the images or videos, and how many text tokens."""

    batch: int
    T: int
    H: int
    W: int
    text: int

    @property
    def grid(self) -> str:
        """As rows of results name it."""
        return f"{self.T}x{self.H}x{self.W}"


SIZES = {
    "wan-1.3b": (Size(1, 21, 30, 52, 512), Size(2, 9, 30, 52, 512)),
    "wan-14b": (Size(1, 21, 30, 52, 512),),
    "flux-dev": (Size(1, 1, 64, 64, 512),),
    "sd3.5-large": (Size(4, 1, 64, 64, 333),),
    "sd3.5-medium": (Size(4, 1, 64, 64, 333),),
    "hunyuan-video": (Size(1, 21, 30, 52, 256),),
}


# narrow and short, the same operators: to try a script
TINY: dict[str, dict[str, Any]] = {
    "wan": dict(num_attention_heads=2, ffn_dim=64, num_layers=1, text_dim=32),
    "flux": dict(num_layers=1, num_single_layers=1, num_attention_heads=2, joint_attention_dim=32,
                 pooled_projection_dim=32),
    "sd3.5": dict(num_layers=2, num_attention_heads=2, caption_projection_dim=128, joint_attention_dim=32,
                  pooled_projection_dim=32),
    "hunyuan": dict(num_layers=1, num_single_layers=1, num_attention_heads=2, num_refiner_layers=1,
                    text_embed_dim=32, pooled_projection_dim=32),
}


def shrink() -> None:
    """Make every model and size of this process tiny."""
    for name, config in CONFIGS.items():
        config |= TINY[name.split("-")[0]]
        if "dual_attention_layers" in config:
            config["dual_attention_layers"] = (0,)
        SIZES[name] = tuple(Size(s.batch, min(s.T, 2), 4, 6, 8) for s in SIZES[name])


def build(name: str, device: str = "cuda") -> torch.nn.Module:
    """The model in bf16; what its class keeps in fp32 stays in fp32 (Wan: tables and every norm)."""
    import diffusers

    from graphopt._factories import to_bf16

    torch.manual_seed(0)
    with torch.device(device):
        model = getattr(diffusers, CLASSES[name])(**CONFIGS[name])
        if not name.startswith("wan"):
            return to_bf16(model)
        model = model.to(torch.bfloat16)
    for parameter, p in model.named_parameters():
        if "scale_shift" in parameter or "norm" in parameter:
            p.data = p.data.float()
    return model


def layers(name: str) -> int:
    """How many blocks it has."""
    config = CONFIGS[name]
    return config["num_layers"] + config.get("num_single_layers", 0)


def inputs(name: str, size: Size, device: str = "cuda") -> dict[str, Any]:
    """Random inputs of one forward."""
    torch.manual_seed(1)
    make: dict[str, Callable[..., dict[str, Any]]] = {"wan": _wan, "flux": _flux, "sd3.5": _sd3, "hunyuan": _hunyuan}
    new = lambda *shape: torch.randn(*shape, device=device, dtype=torch.bfloat16)
    return dict(make[name.split("-")[0]](CONFIGS[name], size, new, device), return_dict=False)


def _wan(c: dict[str, Any], s: Size, new: Any, device: str) -> dict[str, Any]:
    return dict(hidden_states=new(s.batch, c["in_channels"], s.T, 2 * s.H, 2 * s.W),
                timestep=torch.randint(0, 1000, (s.batch,), device=device),
                encoder_hidden_states=new(s.batch, s.text, c["text_dim"]))


def _flux(c: dict[str, Any], s: Size, new: Any, device: str) -> dict[str, Any]:
    ids = torch.cartesian_prod(torch.zeros(1), torch.arange(s.H).float(), torch.arange(s.W).float())
    full = lambda value: torch.full((s.batch,), value, device=device)
    return dict(hidden_states=new(s.batch, s.H * s.W, c.get("in_channels", 64)),
                encoder_hidden_states=new(s.batch, s.text, c.get("joint_attention_dim", 4096)),
                pooled_projections=new(s.batch, c.get("pooled_projection_dim", 768)), timestep=full(0.5).bfloat16(),
                guidance=full(3.5), img_ids=ids.to(device), txt_ids=torch.zeros(s.text, 3, device=device))


def _sd3(c: dict[str, Any], s: Size, new: Any, device: str) -> dict[str, Any]:
    return dict(hidden_states=new(s.batch, 16, 2 * s.H, 2 * s.W),
                encoder_hidden_states=new(s.batch, s.text, c["joint_attention_dim"]),
                pooled_projections=new(s.batch, c["pooled_projection_dim"]),
                timestep=torch.randint(0, 1000, (s.batch,), device=device))


def _hunyuan(c: dict[str, Any], s: Size, new: Any, device: str) -> dict[str, Any]:
    return dict(hidden_states=new(s.batch, 16, s.T, 2 * s.H, 2 * s.W),
                timestep=torch.randint(0, 1000, (s.batch,), device=device),
                encoder_hidden_states=new(s.batch, s.text, c.get("text_embed_dim", 4096)),
                encoder_attention_mask=torch.ones(s.batch, s.text, device=device),
                pooled_projections=new(s.batch, c.get("pooled_projection_dim", 768)),
                guidance=torch.full((s.batch,), 6000.0, device=device, dtype=torch.bfloat16))
