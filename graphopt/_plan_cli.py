"""`graphopt plan`, `plan show`, `plan index`, `plan table`, `fit` and `simulate`.

The main command line mounts them with `mount(app)`.  Everything heavy is imported by the command that needs it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from graphopt._plan_source import Source, takes_source
from graphopt.errors import ConfigError, GraphoptError

plan_app = typer.Typer(
    help="Plan batches of whole optimizer steps; `plan show DIR` looks at one.",
    invoke_without_command=True,
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

def reported(command: Callable[..., None]) -> Callable[..., None]:
    """Print graphopt's errors as text and exit with 2."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except GraphoptError as e:
            typer.echo(f"{type(e).__name__}: {e}", err=True)
            raise typer.Exit(2) from e

    return run


def mount(app: typer.Typer) -> None:
    """Add `plan`, `fit` and `simulate` to a command line."""
    app.add_typer(plan_app, name="plan")
    app.command("fit")(fit)
    app.command("simulate")(simulate)


@contextmanager
def progress(text: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    with Progress(
        TextColumn(text),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task(text, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@plan_app.callback()
@takes_source
@reported
def plan(
    ctx: typer.Context,
    source: Source,
    ranks: Annotated[int, typer.Option(help="Processes of the job.")] = 1,
    policy: Annotated[str, typer.Option(help="step_balanced, adaptive_load or equal_token.")] = "step_balanced",
    epoch: Annotated[int, typer.Option(help="Epoch number: another order, the same samples.")] = 0,
    sync: Annotated[
        str, typer.Option(help="step (DDP, FSDP2 ZeRO-1 style) or microbatch (ZeRO-3, pipelines).")
    ] = "step",
    microbatches: Annotated[float | None, typer.Option(help="K, where the mode fixes it.")] = None,
    allowed_b: Annotated[str | None, typer.Option(help="The only batch sizes to use, e.g. 1,2,4,8.")] = None,
    speeds: Annotated[str | None, typer.Option(help="Relative speed of each data-parallel group.")] = None,
    uneven: Annotated[
        bool, typer.Option(help="Let steps differ in cost where equal ones would leave ranks waiting.")
    ] = True,
    sp: Annotated[int, typer.Option(help="Ranks per sequence-parallel group.")] = 1,
    tail: Annotated[str, typer.Option(help="carry, drop or pad.")] = "carry",
    table: Annotated[
        Path | None, typer.Option(help="Bucket table (Open-Sora, NeMo) whose batch sizes are upper limits.")
    ] = None,
    carry_from: Annotated[
        Path | None, typer.Option(help="Plan of the epoch before: what it carried over comes into this one.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Plan folder to write.")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace an existing plan.")] = False,
    html: Annotated[Path | None, typer.Option(help="Also write a page about the plan.")] = None,
) -> None:
    """Plan one epoch.

    Example: graphopt plan --model wan-14b --gpu h200 --manifest data.parquet --ranks 8 --out plan/
    """
    if ctx.invoked_subcommand is not None:
        return
    if source.manifest is None:
        typer.echo(ctx.get_help())
        raise typer.Exit(2)
    from graphopt.schedule import options, page, report
    from graphopt.schedule.plan import Plan
    from graphopt.schedule.planner import plan_batches
    from graphopt.schedule.tables import read_table

    cost, memory_bytes = source.cost(ranks, sync)
    samples = source.samples()
    limits = None if table is None else read_table(table).limits(samples.shapes, source.layout)
    carried: list[int] = []
    if carry_from is not None:
        before = Plan.load(carry_from)
        before.check_dataset(samples)
        carried = before.carried
    with progress("planning steps") as show:
        made = plan_batches(
            samples,
            cost,
            ranks=ranks,
            m_mem=source.m_mem,
            m_comp=source.m_comp,
            memory_bytes=memory_bytes,
            policy=policy,
            seed=source.seed,
            epoch=epoch,
            tau=source.tau,
            sync=sync,
            microbatches=microbatches,
            allowed_b=options.numbers(allowed_b, "allowed-b", int),
            speeds=options.numbers(speeds, "speeds", float),
            uneven=uneven,
            sp=sp,
            tail=tail,
            limits=limits,
            carry_in=carried,
            out=out,
            overwrite=overwrite,
            progress=show,
        )
    typer.echo(report.text(made))
    for text in source.warnings(made):
        typer.echo(f"warning: {text}", err=True)
    if html is not None:
        page.to_html(made, html)
        typer.echo(f"wrote {html}")
    typer.echo(f"wrote {out}" if out is not None else "not saved: give --out DIR")


@plan_app.command("show")
@reported
def show(
    folder: Annotated[Path, typer.Argument(help="A plan folder.")],
    step: Annotated[int | None, typer.Option(help="Also list this step's microbatches.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page: load per rank, bubble, token mix.")] = None,
) -> None:
    """Look at a plan.

    Example: graphopt plan show plan/ --step 0 --html plan.html
    """
    from graphopt.schedule import page, report
    from graphopt.schedule.plan import Plan

    made = Plan.load(folder)
    typer.echo(report.text(made, step=step))
    if html is not None:
        page.to_html(made, html)
        typer.echo(f"wrote {html}")


@plan_app.command("index")
@reported
def index(
    shards: Annotated[list[Path], typer.Argument(help="WebDataset tar files.")],
    out: Annotated[Path, typer.Option(help="Parquet index to write.")] = Path("index.parquet"),
) -> None:
    """Index WebDataset shards, for --manifest.

    Example: graphopt plan index shards/*.tar --out index.parquet
    """
    from graphopt.schedule.webdataset import index_webdataset

    with progress("indexing samples") as bar:
        count = index_webdataset(shards, out, progress=lambda done: bar(done, done))
    typer.echo(f"{count} samples in {out}")


@plan_app.command("table")
@reported
def table(
    folder: Annotated[Path, typer.Argument(help="A plan folder.")],
    kind: Annotated[str, typer.Option("--format", help="open-sora, finetrainers or nemo.")] = "open-sora",
    fps: Annotated[float, typer.Option(help="Frames per second, for NeMo's durations.")] = 16.0,
    vae: Annotated[str, typer.Option(help="VAE downsampling: frames,height,width.")] = "4,8,8",
    patch: Annotated[str, typer.Option(help="Patch size: frames,height,width.")] = "1,2,2",
) -> None:
    """Print a plan's largest batch per bucket as another trainer's bucket table.

    Example: graphopt plan table plan/ --format open-sora
    """
    import numpy as np

    from graphopt.schedule import options
    from graphopt.schedule.plan import Plan
    from graphopt.schedule.tables import write_table

    made = Plan.load(folder)
    batch = np.zeros(len(made.shapes), np.int64)
    np.maximum.at(batch, made.column("shape"), made.column("batch"))
    used = np.flatnonzero(batch)
    s = made.shapes
    typer.echo(
        write_table(
            kind,
            type(s)(s.t[used], s.h[used], s.w[used], s.caption[used]),
            batch[used],
            options.layout(vae, patch),
            fps=fps,
        ),
        nl=False,
    )


@reported
def fit(
    source: Annotated[
        str, typer.Argument(help="Measured runs (a JSON file), or pkg.module:factory that returns your step function.")
    ],
    form: Annotated[str, typer.Option(help="two_term, power_law or symbolic.")] = "two_term",
    model: Annotated[str | None, typer.Option(help="For symbolic: a built-in model's traced cost.")] = None,
    tokens: Annotated[
        str, typer.Option(help="To measure: token counts of the sweep.")
    ] = "1024,2048,4096,8192,16384,32768",
    caption: Annotated[int, typer.Option(help="To measure: caption tokens.")] = 0,
    budget_s: Annotated[float, typer.Option(help="To measure: seconds.")] = 300.0,
    runs: Annotated[
        Path, typer.Option(help="To measure: where runs are kept; an interrupted sweep goes on from there.")
    ] = Path("runs.json"),
    max_error: Annotated[float, typer.Option(help="Refuse a fit with a larger mean error.")] = 0.10,
    step_overhead_s: Annotated[float, typer.Option(help="Seconds per optimizer step beside microbatches.")] = 0.0,
    anchored: Annotated[bool, typer.Option("--anchored", help="Take measured token counts as measured.")] = False,
    out: Annotated[Path, typer.Option(help="Fit to write.")] = Path("fit.json"),
    plot: Annotated[Path | None, typer.Option(help="PNG or SVG of the fit.")] = None,
) -> None:
    """Measure a sweep of shapes on your own step function (if asked to), and fit a cost model.

    Example: torchrun --nproc_per_node 8 -m graphopt fit train:make_step --tokens 1024,8192,32768 --out fit.json
    """
    from graphopt.schedule import options
    from graphopt.schedule.fitting import fit_cost
    from graphopt.schedule.models import model_cost

    # Under torchrun rank 0 writes and prints; every rank measures.
    first = int(os.environ.get("RANK", "0")) == 0
    measured = options.measured(source, tokens, caption, budget_s, runs)
    if not first:
        return
    cost = model_cost(model).total if model else None
    try:
        made = fit_cost(measured, form, cost=cost, max_error=max_error, step_overhead_s=step_overhead_s,
                        anchored=anchored)  # fmt: skip
    except GraphoptError:
        if plot is not None and len(measured.rows) >= 4:
            from graphopt.schedule.plots import plot_fit

            plot_fit(
                fit_cost(measured, form, cost=cost, refuse=False), plot
            )  # a refused fit is when its plot is wanted most
            typer.echo(f"wrote {plot}", err=True)
        raise
    made.save(out)
    typer.echo(made.describe())
    for name, (low, high) in made.intervals.items():
        typer.echo(f"  {name}: {made.coefficients[name]:.4g}  95 % [{low:.4g}, {high:.4g}]")
    typer.echo(f"  p = {made.p:.3f}, M_comp = {made.m_comp:.4g} (power law through the same runs)")
    if made.memory is not None:
        m = made.memory
        typer.echo(f"  bytes = {m.m0:.4g} + {m.m1:.4g} B S + {m.m2:.4g} B L, largest error {m.max_error:.1%}")
    for e in sorted(made.errors, key=lambda e: -abs(e["error"])):
        typer.echo(f"  B = {e['B']:<4} S = {e['S']:<8} {e['seconds']:10.4f} s  {e['error']:+.1%}")
    if plot is not None:
        from graphopt.schedule.plots import plot_fit

        plot_fit(made, plot)
    typer.echo(f"wrote {out}" + (f" and {plot}" if plot else ""))


@takes_source
@reported
def simulate(
    source: Source,
    ranks: Annotated[str, typer.Option(help="Rank counts, e.g. 8,64,1024.")] = "8",
    policies: Annotated[str, typer.Option(help="Policies to compare.")] = "equal_token,adaptive_load,step_balanced",
    noise: Annotated[float, typer.Option(help="Sigma of each microbatch's lognormal noise.")] = 0.03,
    step_overhead_s: Annotated[
        float | None, typer.Option(help="Seconds per step beside microbatches (the fit's by default).")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="JSON of the figures.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG or SVG of the comparison.")] = None,
) -> None:
    """Compare policies by simulation, without a GPU.

    Example: graphopt simulate --manifest data.parquet --fit fit.json --m-mem 97200 --ranks 8,64 --plot policies.png
    """
    from graphopt.schedule import options, plots, report
    from graphopt.schedule.costmodel import write_json
    from graphopt.schedule.planner import plan_batches
    from graphopt.schedule.simulate import simulate as run

    if source.manifest is None:
        raise ConfigError("simulate needs --manifest", remedy="graphopt simulate --help shows an example")
    samples = source.samples()
    counts, names = options.numbers(ranks, "ranks", int) or [], policies.split(",")
    results = []
    with progress("simulating designs") as bar:
        for n in counts:
            cost, memory_bytes = source.cost(n)
            for policy in names:
                mem = source.m_mem
                if policy == "adaptive_load" and mem is None and cost.memory is not None and memory_bytes is not None:
                    mem = (memory_bytes - cost.memory.m0) / cost.memory.m1  # its formula is in tokens
                made = plan_batches(
                    samples,
                    cost,
                    ranks=n,
                    m_mem=mem,
                    memory_bytes=memory_bytes,
                    m_comp=source.m_comp,
                    policy=policy,
                    tau=source.tau,
                    seed=source.seed,
                )
                r = run(made, cost, noise=noise, seed=source.seed, step_overhead_s=step_overhead_s)
                results.append((policy, r))
                bar(len(results), len(counts) * len(names))
    typer.echo(report.comparison(results))
    if out is not None:
        write_json(out, [{**r.to_json(), "noise": noise, "simulated": True} for _, r in results])
    if plot is not None:
        plots.plot_comparison(results, plot)
    for path in (out, plot):
        if path is not None:
            typer.echo(f"wrote {path}")
