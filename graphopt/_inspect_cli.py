"""`graphopt inspect`.

Exit codes: 0 done; 1 the model cannot be captured; 2 a name, option, factory or file that cannot be used.
"""

from __future__ import annotations

import ast
import functools
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from graphopt.errors import ConfigError, GraphoptError


def reported(command: Callable[..., None]) -> Callable[..., None]:
    """Print graphopt's errors as text: exit code 2 for a ConfigError, 1 for the others; 130 after Ctrl-C."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except GraphoptError as e:
            typer.echo(f"{type(e).__name__}: {e}", err=True)
            raise typer.Exit(2 if isinstance(e, ConfigError) else 1) from e
        except KeyboardInterrupt:
            typer.echo("interrupted; no file was left half-written", err=True)
            raise typer.Exit(130) from None

    return run


@contextmanager
def progress(what: str, after: float = 2.0) -> Iterator[None]:
    """After two seconds, a line on stderr that counts the seconds until the work is done."""
    done, start = threading.Event(), time.monotonic()
    live = sys.stderr.isatty()

    def tick() -> None:
        if done.wait(after):
            return
        while True:
            text = f"{what}: {time.monotonic() - start:.0f} s"
            print(f"\r{text} " if live else text, end="" if live else "\n", file=sys.stderr, flush=True)
            if done.wait(1.0 if live else 10.0):
                if live:
                    print("\r" + " " * (len(text) + 2) + "\r", end="", file=sys.stderr, flush=True)
                return

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@reported
def inspect(
    model: Annotated[str, typer.Argument(help="A built-in model (wan-14b, flux-dev, ..; `list` names them) or "
                                              "package.module:factory, which returns (model, inputs).")],
    shape: Annotated[list[str] | None, typer.Option(help="Sizes, e.g. frames=49,height=480; of a factory: its "
                                                         "keyword arguments.")] = None,
    why: Annotated[list[str] | None, typer.Option(help="Answer for one module instead, e.g. blocks.3.norm1.")] = None,
    diff: Annotated[list[str] | None, typer.Option(help="Show what a pass or rule replaced, side by side.")] = None,
    json_: Annotated[Path | None, typer.Option("--json", help="Write everything, nodes included, as JSON.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page.")] = None,
    dot: Annotated[Path | None, typer.Option(help="Write the rewritten graph for Graphviz.")] = None,
    device: Annotated[str, typer.Option(help="meta (falls back to cpu where a model needs it) or cpu.")] = "meta",
    target: Annotated[str, typer.Option(help="GPU to choose kernels for: sm80, sm90, sm100, gfx942.")] = "sm90",
    option: Annotated[list[str] | None, typer.Option(help="An option of the backend, e.g. select=all.")] = None,
    stream: Annotated[list[str] | None, typer.Option(help="Also plan its streaming, e.g. slots=2 or update=priority.")]
    = None,
) -> None:
    """Show what graphopt does to a model and why, without a GPU and without weights.

    Example: graphopt inspect wan-14b --shape frames=81,height=480,width=832 --why blocks.3.norm1 --html wan.html
    """
    if model == "list":
        from graphopt.schedule.builtin import BUILTIN

        for name, b in BUILTIN.items():
            typer.echo(f"{name:16} {b.source}, {b.layers} layers, diffusers.{b.cls}")
        return
    for path in (json_, html, dot):
        _must_be_writable(path)
    with progress(f"inspecting {model}"):
        import graphopt
        from graphopt import _factories, _inspect

        made = _factories.make(model, _factories.parse_shape(shape or []))
        seen = graphopt.inspect(made.model, *made.args, device=device, target=target, options=_options(option or []),
                                title=made.title, stream=_settings(stream) if stream else None, **made.kwargs)
        answers = [seen.why(name) for name in why or []] + [seen.diff(name) for name in diff or []]
        files: list[tuple[Path, str]] = []
        if json_ is not None:
            files.append((json_, seen.to_json(nodes_too=True)))
        if dot is not None:
            files.append((dot, seen.to_dot("after")))
        if html is not None:
            files.append((html, seen.to_html()))
    for text in answers or [str(seen)]:
        typer.echo(text)
    for path, content in files:
        _inspect.write(path, content)
        typer.echo(f"wrote {path}", err=True)


def _settings(texts: list[str]) -> dict[str, Any]:
    """`slots=2` as settings of the streaming."""
    return {k.removeprefix("graphopt."): v for k, v in _options(texts).items()}


def _options(texts: list[str]) -> dict[str, Any]:
    """`select=all`, `verify=True`, `rules=gate_residual,gate_norm` as backend options; values are JSON or Python where
    they can be."""
    out: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--option {text!r} is not name=value", remedy="for example --option select=all")
        parsed = _value(value)
        name = key.removeprefix("graphopt.")
        if name in ("rules", "disable", "experimental") and isinstance(parsed, str):
            parsed = [n.strip() for n in parsed.split(",") if n.strip()]
        out[key if "." in key else f"graphopt.{key}"] = parsed
    return out


def _value(text: str) -> Any:
    """`true`, `True`, `[1, 2]`, `(3, 7, 7)`, `{"window": [3, 7, 7]}`; anything else is the text itself."""
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError):
            pass
    return text


def _must_be_writable(path: Path | None) -> None:
    """Say so before a minute of work, not after it."""
    import os

    if path is None:
        return
    folder = path.parent
    if path.is_dir():
        raise ConfigError("a file cannot be written where a folder is", where=str(path), remedy="give a file name")
    if folder.exists() and (not folder.is_dir() or not os.access(folder, os.W_OK)):
        raise ConfigError("the folder cannot be written", where=str(folder), remedy="choose another one")
    if path.exists() and not os.access(path, os.W_OK):
        raise ConfigError("the file cannot be written", where=str(path), remedy="choose another one")
