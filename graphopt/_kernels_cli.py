"""`graphopt kernels show` and `graphopt kernels compile`: the generated kernels, without a model and without a GPU."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphopt._inspect_cli import progress
from graphopt.errors import CodegenError, ConfigError, GraphoptError

if TYPE_CHECKING:
    from graphopt.codegen.compiler import Unit

WIDTHS = "1152,1536,3072,5120"
app = typer.Typer(no_args_is_help=True, help="The generated kernels: show their source, compile them for any target.")

Dtype = Annotated[str, typer.Option("--dtype", help="Activations: bf16, fp16 or fp32.")]
Factors = Annotated[str, typer.Option("--factors", help="Scale, shift, gate, weight: bf16, fp16 or fp32.")]
Layout = Annotated[str, typer.Option("--layout", help="Factors: group ([B, 1, D]), vector ([D]) or token ([B, S, D]).")]
Norm = Annotated[str | None, typer.Option("--norm", help="layer_norm or rms_norm; default: what models use.")]


def _fail(error: GraphoptError) -> typer.Exit:
    typer.echo(f"{type(error).__name__}: {error}", err=True)
    return typer.Exit(2)


def _width(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise CodegenError(f"no width: {text!r}", remedy="give numbers: --widths 1152,5120") from None


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="A fusion (norm_modulate) or one kernel of it (norm_modulate_backward).")],
    width: Annotated[int, typer.Option("--width", "-D", help="Channels D, 1 to 65536.")] = 3072,
    dtype: Dtype = "bf16",
    factors: Factors = "fp32",
    layout: Layout = "group",
    norm: Norm = None,
    outputs: Annotated[str | None, typer.Option(help="Outputs, one word each: 'scale+shift plain'.")] = None,
    target: Annotated[str, typer.Option("--target", help="The GPU.")] = "sm90",
    tables: Annotated[bool, typer.Option("--tables", help="Factors are a table plus an embedding.")] = False,
    rounding: Annotated[str, typer.Option(help="Rounding points of numerics='eager'.")] = "",
) -> None:
    """Print the source of a kernel.

    Example: graphopt kernels show gate_norm_modulate_backward --width 5120
    """
    from graphopt.codegen.examples import example, units
    from graphopt.codegen.form import FUSIONS

    fusion = max((f for f in FUSIONS if name.startswith(f)), key=len, default=name)
    try:
        found = units(example(fusion, width, dtype=dtype, factors=factors, layout=layout, norm=norm, outputs=outputs,
                              tables=tables, rounding=rounding, target=target))
        wanted = name.removeprefix(fusion)
        picked = [u for u in found if not wanted or wanted in u.function.removeprefix(found[0].function[:-8])]
        if not picked:
            raise CodegenError(f"unknown kernel {name!r}", remedy=f"known are {', '.join(u.function for u in found)}")
    except CodegenError as error:
        raise _fail(error) from error
    for unit in picked:
        typer.echo(f"# {unit.function}, D = {unit.D}, {unit.warps} warps")
        typer.echo(unit.source)


@app.command(name="compile")
def compile_(
    target: Annotated[str, typer.Option("--target", help="GPUs, such as sm80,sm90,sm100,gfx942.")] = "sm90",
    widths: Annotated[str, typer.Option("--widths", help="Channels D.")] = WIDTHS,
    fusions: Annotated[str, typer.Option("--fusions", help="Fusions; default: all.")] = "",
    dtype: Dtype = "bf16",
    factors: Factors = "fp32",
    layout: Layout = "group",
    norm: Norm = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", help="Compilers at once; default: one per CPU.")] = 0,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write the table to a file too.")] = None,
) -> None:
    """Compile kernels for targets that need not be here; print registers, spills and shared memory.

    Exit code 1 if a kernel does not compile.  Example: graphopt kernels compile --target sm80,sm90,sm100,gfx942
    """
    from graphopt.codegen.compiler import gpu_target
    from graphopt.codegen.examples import example, units
    from graphopt.codegen.form import FUSIONS
    from graphopt.reporting import write

    try:
        targets = target.split(",")
        for t in targets:
            gpu_target(t)
        kind: dict[str, Any] = dict(dtype=dtype, factors=factors, layout=layout, norm=norm)
        each = [(t, u) for t in targets for f in (fusions.split(",") if fusions else FUSIONS)
                for D in map(_width, widths.split(",")) for u in units(example(f, D, target=t, **kind))]
    except CodegenError as error:
        raise _fail(error) from error
    try:
        with progress(f"compiling {len(each)} kernels"):
            rows, interrupted = compile_all(each, jobs or os.cpu_count() or 1), False
    except Interrupted as stop:
        rows, interrupted = stop.rows, True
    typer.echo(f"{'target':8s} {'kernel':52s} {'D':>6s} {'warps':>5s} {'registers':>9s} {'spills':>6s} {'shared':>7s}")
    for r in rows:
        figures = r.get("error") or f"{r['registers']:9d} {r['spills']:6d} {r['shared']:7d}"
        typer.echo(f"{r['target']:8s} {r['kernel']:52s} {r['D']:6d} {r['warps']:5d} {figures}")
    failed = sum("error" in r for r in rows)
    spilled = sum(r.get("spills", 0) > 0 for r in rows)
    typer.echo(f"{len(rows)} kernels, {failed} failed, {spilled} spill")
    if interrupted:
        typer.echo(f"interrupted; {len(each) - len(rows)} kernels were not compiled", err=True)
    if as_json is not None:
        try:
            write(as_json, json.dumps(rows, indent=1) + "\n")
        except ConfigError as error:
            raise _fail(error) from error
    raise typer.Exit(130 if interrupted else 1 if failed else 0)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C; `rows` are those of the kernels compiled by then."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        super().__init__()
        self.rows = rows


def compile_all(wanted: list[tuple[str, Unit]], jobs: int) -> list[dict[str, Any]]:
    """Compile (target, unit) pairs in several compiler processes; rows in their order, errors as text.

    Raises Interrupted on Ctrl-C, at once.
    """
    from graphopt.codegen.compiler import Compiler

    jobs = max(1, min(jobs, len(wanted)))
    compilers = [Compiler() for _ in range(jobs)]

    def one(i: int) -> dict[str, Any]:
        target, unit = wanted[i]
        row = {"target": target, "kernel": unit.function, "D": unit.D, "warps": unit.warps}
        try:
            found = compilers[i % jobs].compile(unit, target)
        except CodegenError as error:
            return row | {"error": error.what}
        return row | {"registers": found.registers, "spills": found.spills, "shared": found.shared}

    pool = ThreadPoolExecutor(jobs)
    futures = [pool.submit(one, i) for i in range(len(wanted))]
    try:
        return [f.result() for f in futures]
    except KeyboardInterrupt:
        done = [f.result() for f in futures if f.done() and not f.cancelled() and f.exception() is None]
        raise Interrupted(done) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for compiler in compilers:
            compiler.stop()
