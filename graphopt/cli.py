"""The command line: `graphopt VERB`, also `python -m graphopt VERB`."""

from __future__ import annotations

import sys

import typer

from graphopt import _bench_cli, _inspect_cli, _kernels_cli, _plan_cli, _script

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="Graph rewriting for training diffusion transformers with torch.compile(model, backend='graphopt').",
)


_plan_cli.mount(app)
app.command()(_inspect_cli.inspect)
app.add_typer(_kernels_cli.app, name="kernels")
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(_bench_cli.bench)


@app.command()
def demo(
    steps: int = typer.Option(30, min=1, help="Training steps of each run."),
    compiler: str = typer.Option("", help="What compiles the rewritten graph: inductor (default) or aot_eager."),
    device: str = typer.Option("", help="cuda or cpu; default: a GPU if there is one."),
) -> None:
    """Train a Wan-shaped transformer twice, eager and with graphopt, and compare.

    Example: graphopt demo --steps 30
    """
    from graphopt import demo as run

    raise typer.Exit(run.main(steps, device or None, compiler or None))


@app.command()
@_inspect_cli.reported
def doctor(
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead."),
) -> None:
    """Say what this machine and this torch are, and what would not work; paste it into a bug report.

    Exit code 1 if there is a problem.  Example: graphopt doctor > doctor.txt
    """
    with _inspect_cli.progress("examining"):
        from graphopt import doctor as examination

        found = examination.examine()
    typer.echo(examination.to_json(found) if as_json else examination.text(found))
    raise typer.Exit(1 if any(f.problem for f in found) else 0)


@app.command()
def rules() -> None:
    """List the rules, with the graph before and after each.

    Example: graphopt rules
    """
    import inspect

    with _inspect_cli.progress("loading the rules"):
        from graphopt.passes import catalogue

    for rule in catalogue.every():
        module = sys.modules[(rule.replace or rule.function or rule.check).__module__]
        typer.echo(f"{rule.name}  (switched by {', '.join(sorted(rule.families))})")
        typer.echo(inspect.cleandoc(module.__doc__ or "") + "\n")


def main() -> None:
    """Entry point of the `graphopt` command.  Ctrl-C at any moment, also before a command runs, ends with 130."""
    _script.answering(app, "interrupted; no file was left half-written")
