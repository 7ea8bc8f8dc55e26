"""graphopt: graph rewriting for people who train diffusion transformers with `torch.compile`."""

__version__ = "0.1.0"
