"""Built-in models at their real sizes: the diffusers class, its configuration, and inputs of a given shape.

The one list of such models; planning traces their costs (models.py) and inspection captures their graphs.  Nothing
is downloaded: a model is built from its configuration, without weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graphopt.errors import ConfigError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Shape:
    """A batch: pixels, and caption tokens."""

    batch: int
    frames: int
    height: int
    width: int
    text: int


@dataclass(frozen=True)
class Latent:
    """The same after the VAE: channels, and the size of the latent grid."""

    channels: int
    t: int
    h: int
    w: int


Inputs = Callable[["Builtin", Shape, Latent], dict[str, Any]]


@dataclass(frozen=True)
class Builtin:
    """How to build a model with any number of layers, and its inputs.

    Args:
        cls: name of the diffusers class.  config: its arguments but the depth.  depth: the arguments that set the
            numbers of layers, with the real values.  inputs: makes the keyword inputs of its forward.
        default: the shape most runs use (one sample).
        vae: pixels per latent in (frames, height, width).  patch: latents per token in (frames, height, width).
        text: channels of a caption token.  fixed: parts of a shape that the architecture fixes.
        source: what the configuration is that of.
    """

    cls: str
    config: dict[str, Any]
    depth: dict[str, int]
    inputs: Inputs
    default: Shape
    text: int
    vae: tuple[int, int, int] = (4, 8, 8)
    patch: tuple[int, int, int] = (1, 2, 2)
    fixed: frozenset[str] = frozenset()
    source: str = ""

    @property
    def layers(self) -> int:
        """The real number of layers (all kinds together)."""
        return sum(self.depth.values())

    @property
    def width(self) -> int:
        """Channels of a token, what a layer boundary stores."""
        return self.config["num_attention_heads"] * self.config["attention_head_dim"]

    def build(self, **depth: int) -> torch.nn.Module:
        """The model in fp32 on torch's default device; `depth` sets other numbers of layers."""
        import diffusers

        return getattr(diffusers, self.cls)(**self.config, **{**self.depth, **depth})

    def latent(self, shape: Shape) -> Latent:
        """The latent grid of a batch.  ConfigError if pixels do not fill whole tokens."""
        pixels = {"frames": shape.frames, "height": shape.height, "width": shape.width}
        sizes = []
        for (name, n), down, patch in zip(pixels.items(), self.vae, self.patch):
            causal = name == "frames" and down > 1  # the first frame is encoded alone
            if min(n, shape.batch, shape.text) < 1:
                raise ConfigError(f"the shape {shape} has a size below 1", remedy="give positive sizes")
            size = 1 + (n - 1) // down if causal else n // down
            if (n - causal) % down or size % patch:
                rule = f"1 + a multiple of {down}" if causal else f"a multiple of {down * patch}"
                raise ConfigError(f"{name}={n} does not fill whole tokens", remedy=f"use {rule}")
            sizes.append(size)
        return Latent(self.config.get("in_channels", 16), *sizes)


# -- inputs: keyword arguments of forward; floats are made in the model's dtype by the caller's cast -----------------


def _common(b: Builtin, s: Shape, x: tuple[int, ...]) -> dict[str, Any]:
    import torch

    return {
        "hidden_states": torch.zeros(s.batch, *x),
        "encoder_hidden_states": torch.zeros(s.batch, s.text, b.text),
        "timestep": torch.full((s.batch,), 500),
    }


def _video(b: Builtin, s: Shape, z: Latent) -> dict[str, Any]:
    return _common(b, s, (z.channels, z.t, z.h, z.w))


def _image(b: Builtin, s: Shape, z: Latent) -> dict[str, Any]:
    return _common(b, s, (z.channels, z.h, z.w))


def _frames_first(b: Builtin, s: Shape, z: Latent) -> dict[str, Any]:
    import torch

    tokens = z.t * (z.h // 2) * (z.w // 2)
    width = b.config["attention_head_dim"]
    rotary = (torch.zeros(tokens, width), torch.zeros(tokens, width))
    return {**_common(b, s, (z.t, z.channels, z.h, z.w)), "image_rotary_emb": rotary}


def _packed(b: Builtin, s: Shape, z: Latent) -> int:
    return (z.h // b.patch[1]) * (z.w // b.patch[2])


def _hunyuan(b: Builtin, s: Shape, z: Latent) -> dict[str, Any]:
    import torch

    return {
        **_video(b, s, z),
        "encoder_attention_mask": torch.ones(s.batch, s.text),
        "pooled_projections": torch.zeros(s.batch, b.config["pooled_projection_dim"]),
        "guidance": torch.full((s.batch,), 6000.0),
    }


def _masked(boolean: bool, video: bool) -> Inputs:
    def make(b: Builtin, s: Shape, z: Latent) -> dict[str, Any]:
        import torch

        mask = torch.ones(s.batch, s.text, dtype=torch.bool if boolean else None)
        return {**(_video if video else _image)(b, s, z), "encoder_attention_mask": mask}

    return make


def _pixart(b: Builtin, s: Shape, z: Latent) -> dict[str, Any]:
    nothing = {"resolution": None, "aspect_ratio": None}
    return {**_masked(False, False)(b, s, z), "added_cond_kwargs": nothing}


def _ltx(b: Builtin, s: Shape, z: Latent) -> dict[str, Any]:
    import torch

    return {
        **_common(b, s, (z.t * z.h * z.w, z.channels)),
        "encoder_attention_mask": torch.ones(s.batch, s.text),
        "num_frames": z.t, "height": z.h, "width": z.w,
    }


def _flux(b: Builtin, s: Shape, z: Latent) -> dict[str, Any]:
    import torch

    tokens = _packed(b, s, z)
    return {
        **_common(b, s, (tokens, z.channels)),
        "timestep": torch.full((s.batch,), 0.5),
        "pooled_projections": torch.zeros(s.batch, b.config["pooled_projection_dim"]),
        "guidance": torch.full((s.batch,), 3.5),
        "img_ids": torch.zeros(tokens, 3), "txt_ids": torch.zeros(s.text, 3),
    }


def _sd3(b: Builtin, s: Shape, z: Latent) -> dict[str, Any]:
    import torch

    return {**_image(b, s, z), "pooled_projections": torch.zeros(s.batch, b.config["pooled_projection_dim"])}


def _qwen(b: Builtin, s: Shape, z: Latent) -> dict[str, Any]:
    import torch

    return {
        **_common(b, s, (_packed(b, s, z), z.channels)),
        "timestep": torch.full((s.batch,), 0.5),
        "encoder_hidden_states_mask": torch.ones(s.batch, s.text, dtype=torch.int64),
        "img_shapes": [[(1, z.h // 2, z.w // 2)]] * s.batch,
    }


# -- the models -------------------------------------------------------------------------------------------------------

WAN = {"attention_head_dim": 128, "in_channels": 16, "out_channels": 16, "text_dim": 4096, "freq_dim": 256}
ADALN_SINGLE = {
    "num_attention_heads": 16, "attention_head_dim": 72, "in_channels": 4, "out_channels": 8,
    "cross_attention_dim": 1152, "attention_bias": True, "patch_size": 2, "activation_fn": "gelu-approximate",
    "num_embeds_ada_norm": 1000, "norm_type": "ada_norm_single", "norm_elementwise_affine": False, "norm_eps": 1e-6,
    "caption_channels": 4096,
}
SD35 = {
    "sample_size": 128, "patch_size": 2, "in_channels": 16, "out_channels": 16, "attention_head_dim": 64,
    "joint_attention_dim": 4096, "pooled_projection_dim": 2048, "qk_norm": "rms_norm",
}
IMAGE = frozenset({"frames"})
PIXELS = frozenset({"frames", "height", "width"})

BUILTIN: dict[str, Builtin] = {
    "wan-1.3b": Builtin(
        "WanTransformer3DModel", {**WAN, "num_attention_heads": 12, "ffn_dim": 8960}, {"num_layers": 30}, _video,
        Shape(1, 81, 480, 832, 512), 4096, source="Wan 2.1 T2V 1.3B",
    ),
    "wan-14b": Builtin(
        "WanTransformer3DModel", {**WAN, "num_attention_heads": 40, "ffn_dim": 13824}, {"num_layers": 40}, _video,
        Shape(1, 81, 480, 832, 512), 4096, source="Wan 2.1 T2V 14B",
    ),
    "hunyuan-video": Builtin(
        "HunyuanVideoTransformer3DModel",
        {"in_channels": 16, "out_channels": 16, "num_attention_heads": 24, "attention_head_dim": 128,
         "num_refiner_layers": 2, "patch_size": 2, "text_embed_dim": 4096, "pooled_projection_dim": 768,
         "rope_axes_dim": (16, 56, 56), "guidance_embeds": True},
        {"num_layers": 20, "num_single_layers": 40}, _hunyuan,
        Shape(1, 129, 720, 1280, 256), 4096, source="HunyuanVideo T2V",
    ),
    "cogvideox-5b": Builtin(
        "CogVideoXTransformer3DModel",
        {"num_attention_heads": 48, "attention_head_dim": 64, "in_channels": 16, "out_channels": 16,
         "time_embed_dim": 512, "text_embed_dim": 4096, "sample_width": 90, "sample_height": 60, "sample_frames": 49,
         "max_text_seq_length": 226, "use_rotary_positional_embeddings": True},
        {"num_layers": 42}, _frames_first, Shape(1, 49, 480, 720, 226), 4096, source="CogVideoX 5B",
    ),
    "ltx-video": Builtin(
        "LTXVideoTransformer3DModel",
        {"in_channels": 128, "out_channels": 128, "num_attention_heads": 32, "attention_head_dim": 64,
         "cross_attention_dim": 2048, "caption_channels": 4096},
        {"num_layers": 28}, _ltx, Shape(1, 161, 480, 704, 128), 4096, vae=(8, 32, 32), patch=(1, 1, 1),
        source="LTX-Video 0.9 (2B)",
    ),
    "mochi": Builtin(
        "MochiTransformer3DModel",
        {"num_attention_heads": 24, "attention_head_dim": 128, "pooled_projection_dim": 1536, "in_channels": 12,
         "text_embed_dim": 4096, "time_embed_dim": 256, "max_sequence_length": 256},
        {"num_layers": 48}, _masked(True, True), Shape(1, 19, 240, 416, 256), 4096, vae=(6, 8, 8),
        source="Mochi 1 preview",
    ),
    "flux-dev": Builtin(
        "FluxTransformer2DModel",
        {"in_channels": 64, "attention_head_dim": 128, "num_attention_heads": 24, "joint_attention_dim": 4096,
         "pooled_projection_dim": 768, "guidance_embeds": True, "axes_dims_rope": (16, 56, 56)},
        {"num_layers": 19, "num_single_layers": 38}, _flux, Shape(1, 1, 1024, 1024, 512), 4096, vae=(1, 8, 8),
        fixed=IMAGE, source="FLUX.1 dev",
    ),
    "sd3.5-large": Builtin(
        "SD3Transformer2DModel",
        {**SD35, "num_attention_heads": 38, "caption_projection_dim": 2432, "pos_embed_max_size": 192},
        {"num_layers": 38}, _sd3, Shape(1, 1, 1024, 1024, 333), 4096, vae=(1, 8, 8), fixed=IMAGE,
        source="Stable Diffusion 3.5 large",
    ),
    "sd3.5-medium": Builtin(
        "SD3Transformer2DModel",
        {**SD35, "num_attention_heads": 24, "caption_projection_dim": 1536, "pos_embed_max_size": 384,
         "dual_attention_layers": tuple(range(13))},
        {"num_layers": 24}, _sd3, Shape(1, 1, 1024, 1024, 333), 4096, vae=(1, 8, 8), fixed=IMAGE,
        source="Stable Diffusion 3.5 medium",
    ),
    "latte": Builtin(
        "LatteTransformer3DModel", {**ADALN_SINGLE, "sample_size": 64, "video_length": 16}, {"num_layers": 28}, _video,
        Shape(1, 16, 512, 512, 120), 4096, vae=(1, 8, 8), fixed=PIXELS, source="Latte-1",
    ),
    "pixart": Builtin(
        "PixArtTransformer2DModel",
        {**ADALN_SINGLE, "sample_size": 128, "interpolation_scale": 2, "use_additional_conditions": False},
        {"num_layers": 28}, _pixart, Shape(1, 1, 1024, 1024, 300), 4096, vae=(1, 8, 8), fixed=IMAGE,
        source="PixArt-Sigma XL 1024",
    ),
    "qwen-image": Builtin(
        "QwenImageTransformer2DModel",
        {"in_channels": 64, "out_channels": 16, "attention_head_dim": 128, "num_attention_heads": 24,
         "joint_attention_dim": 3584, "axes_dims_rope": (16, 56, 56)},
        {"num_layers": 60}, _qwen, Shape(1, 1, 1328, 1328, 256), 3584, vae=(1, 8, 8), fixed=IMAGE, source="Qwen-Image",
    ),
}
