"""The options that `plan` and `simulate` share: the data set, the cost model, the limits.

`takes_source` gives a command these options: typer sees them one by one, the command gets a `Source`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from graphopt.schedule.costmodel import CostFit
    from graphopt.schedule.dataset import Samples
    from graphopt.schedule.plan import Plan
    from graphopt.schedule.shapes import LatentLayout


def _option(name: str, text: str) -> Any:
    return typer.Option(name, help=text)


@dataclass(frozen=True)
class Source:
    """What is planned, from which costs, under which limits; each field is an option of the command line."""

    manifest: Annotated[Path | None, _option(
        "--manifest", "Metadata: Parquet, CSV or JSONL with frames, height, width (and caption_length), or tokens.")
    ] = None
    columns: Annotated[str | None, _option(
        "--columns", "Your names of the columns, e.g. frames=nf,height=h,width=w,caption=len,id=key.")] = None
    fit_file: Annotated[Path | None, _option("--fit", "A fit that `graphopt fit` wrote.")] = None
    model: Annotated[str | None, _option("--model", "Instead of a fit: a built-in model (wan-1.3b, wan-14b).")] = None
    gpu: Annotated[str, _option("--gpu", "With --model: h200, h100, a100-80gb.")] = "h200"
    remat: Annotated[str, _option("--remat", "With --model: full or none.")] = "full"
    eager: Annotated[bool, _option("--eager", "With --model: it is not compiled.")] = False
    m_mem: Annotated[float | None, _option("--m-mem", "Memory limit: tokens of a microbatch per rank.")] = None
    memory_gib: Annotated[float | None, _option(
        "--memory-gib", "Memory limit in GiB per rank (needs a memory model).")] = None
    m_comp: Annotated[float | None, _option("--m-comp", "Compute limit: B * S^p of a microbatch.")] = None
    vae: Annotated[str, _option("--vae", "VAE downsampling: frames,height,width.")] = "4,8,8"
    patch: Annotated[str, _option("--patch", "Patch size: frames,height,width.")] = "1,2,2"
    caption_bin: Annotated[int, _option("--caption-bin", "Caption lengths are padded to a multiple of this.")] = 512
    seed: Annotated[int, _option("--seed", "Seed of the order.")] = 0
    tau: Annotated[float, _option("--tau", "Cost of a rank's step, in units of the costliest sample.")] = 1.3

    @property
    def layout(self) -> LatentLayout:
        """VAE and patch factors."""
        from graphopt.schedule import options

        return options.layout(self.vae, self.patch)

    def samples(self) -> Samples:
        """The data set's metadata."""
        from graphopt.schedule import options
        from graphopt.schedule.dataset import read_samples

        assert self.manifest is not None
        names = options.pairs(self.columns, "columns")
        return read_samples(self.manifest, layout=self.layout, caption_bin=self.caption_bin, columns=names)

    def cost(self, ranks: int, sync: str = "step") -> tuple[CostFit, float | None]:
        """(cost model, memory limit in bytes) for this many ranks; parameters are sharded with sync "microbatch"."""
        from graphopt.schedule import options

        return options.cost(
            self.fit_file, self.model, self.gpu, self.remat, ranks, self.m_mem, self.memory_gib,
            compiled=not self.eager, sharded=sync == "microbatch",
        )  # fmt: skip


    def warnings(self, plan: Plan) -> list[str]:
        """What the description of the GPU says about a plan made under a limit of tokens."""
        if self.model is None or self.m_mem is None or len(plan) == 0:
            return []
        from graphopt.schedule.hardware import hardware

        need, memory = float(plan.column("bytes").max()), hardware(self.gpu).memory
        if need <= memory:
            return []
        return [
            f"the largest microbatch is predicted to need {need / 2**30:.0f} GiB, and the {self.gpu} has "
            f"{memory / 2**30:.0f}: lower --m-mem, or give --memory-gib"
        ]


def takes_source(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter `source` of a command by one option per field of `Source`."""
    fields = dataclasses.fields(Source)
    hints = get_type_hints(Source, include_extras=True)
    given = inspect.signature(command)
    shared = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
        for f in fields
    ]
    own = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for n, p in given.parameters.items() if n != "source"]

    @functools.wraps(command)
    def run(**kwargs: Any) -> None:
        source = Source(**{f.name: kwargs.pop(f.name) for f in fields})
        command(source=source, **kwargs)

    annotations = get_type_hints(command, include_extras=True)
    annotations.pop("source", None)
    run.__annotations__ = {**{f.name: hints[f.name] for f in fields}, **annotations}
    own = [p.replace(annotation=run.__annotations__[p.name]) for p in own]
    run.__signature__ = given.replace(parameters=[*shared, *own])  # type: ignore[attr-defined]
    return run
