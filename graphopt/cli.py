"""The command line: `graphopt VERB`, also `python -m graphopt VERB`."""

from __future__ import annotations

import typer

from graphopt import _inspect_cli, _kernels_cli, _plan_cli

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="Graph rewriting for training diffusion transformers with torch.compile(model, backend='graphopt').",
)


_plan_cli.mount(app)
app.command()(_inspect_cli.inspect)
app.add_typer(_kernels_cli.app, name="kernels")


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
def rules() -> None:
    """List the rules, with the graph before and after each.

    Example: graphopt rules
    """
    import inspect
    import sys

    from graphopt.passes import catalogue

    for rule in catalogue.RULES:
        module = sys.modules[rule.check.__module__]
        typer.echo(f"{rule.name}  (switched by {', '.join(sorted(rule.families))})")
        typer.echo(inspect.cleandoc(module.__doc__ or "") + "\n")


def main() -> None:
    """Entry point of the `graphopt` command."""
    app()
