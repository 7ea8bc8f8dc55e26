"""Options: what a user may set, parsed once into a frozen Config.

Sources, the later one wins: defaults, `graphopt.configure(...)`, the environment (GRAPHOPT_DISABLE, GRAPHOPT_STRICT),
`options=` of torch.compile.  Keys that start with `graphopt.` are ours, all others go to Inductor.
"""

from __future__ import annotations

import difflib
import operator
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from graphopt import _compat
from graphopt.errors import ConfigError
from graphopt.passes import catalogue
from graphopt.passes.lower_video_attention import Request

PREFIX = "graphopt."
CHOICES: dict[str, tuple[str, ...]] = {
    "select": ("profitable", "all"),
    "numerics": ("fp32", "eager"),
    "on_error": ("fallback", "raise"),
    "regions": ("off", "auto"),
    "compiler": ("inductor", "aot_eager", "eager"),
}


@dataclass(frozen=True)
class Config:
    """How one compiled callable is treated.

    rules: names of rules or families that run; None: every rule that keeps the maths.
    disable: names that do not run, whatever `rules` says.
    experimental: passes that do all they can only when asked for: "joint_launch", which joins forwards otherwise.
    select: "profitable" leaves a site to Inductor where it is predicted to be faster there, "all" rewrites every one.
    numerics: "fp32" rounds once at the end of a site, "eager" after each op of the source.
    on_error: "fallback" leaves a site alone when something about it fails, "raise" raises.
    verify: compare every site with fp64 on the inputs of the first call, and leave out (or raise for) what differs.
    regions: "auto" compiles one of N equal layers once, for all of them; "off" compiles the graph as one.
    compiler: what compiles the rewritten graph.
    mode: a mode of Inductor (torch.compile refuses mode= beside options=).
    dsa: make global attention slide (changes the maths; docs/dsa.md): a dict of window, grid, select, keep_dense,
        boundary; None leaves attention alone.
    """

    rules: tuple[str, ...] | None = None
    disable: tuple[str, ...] = ()
    experimental: tuple[str, ...] = ()
    select: str = "profitable"
    numerics: str = "fp32"
    on_error: str = "fallback"
    verify: bool = False
    regions: str = "off"
    compiler: str = "inductor"
    mode: str | None = None
    dsa: Request | None = None


_defaults = Config()


def configure(**settings: Any) -> Config:
    """Set process-wide defaults, for callables compiled from now on.

    Example: `graphopt.configure(numerics="fp32", select="all")`.  Returns the new defaults.  ConfigError names an
    unknown setting and its nearest known one; nothing is changed then.
    """
    global _defaults
    _defaults = _apply(_defaults, settings, prefix="")
    return _defaults


def reset() -> None:
    """Back to the built-in defaults."""
    global _defaults
    _defaults = Config()


def parse(mode: str | None, options: Mapping[str, Any] | None) -> tuple[Config, dict[str, Any]]:
    """`mode=` and `options=` of torch.compile as (Config, options for Inductor)."""
    options = dict(options or {})
    for key in options:
        if not isinstance(key, str):
            raise ConfigError(f"unknown option {key!r}", remedy="keys of options= are names such as 'graphopt.select'")
    ours = {k.removeprefix(PREFIX): v for k, v in options.items() if k.startswith(PREFIX)}
    rest = {k: v for k, v in options.items() if not k.startswith(PREFIX)}
    config = _apply(_from_environment(_defaults), ours, prefix=PREFIX)
    if mode is not None and mode != "default":
        config = _apply(config, {"mode": mode}, prefix="")
    _check_inductor_keys(rest, config)
    asked = mode or ours.get("mode")
    if config.compiler != "inductor" and asked not in (None, "default"):
        raise ConfigError(
            f"mode {asked!r} is Inductor's, but graphopt.compiler is {config.compiler!r}",
            remedy="leave it out, or compile with Inductor",
        )
    inductor: dict[str, Any] = {}
    if config.compiler == "inductor":
        if config.mode is not None:
            inductor |= _compat.inductor_mode_options(config.mode)
        if _compat.mix_order_is_wrong():
            inductor[_compat.MIX_ORDER] = False
        inductor |= {k.replace("-", "_"): v for k, v in rest.items()}
    return config, inductor


def _from_environment(config: Config) -> Config:
    disabled = tuple(n.strip() for n in os.environ.get("GRAPHOPT_DISABLE", "").split(",") if n.strip())
    if disabled:
        _check_rules("GRAPHOPT_DISABLE", disabled)
        config = replace(config, disable=config.disable + disabled)
    strict = os.environ.get("GRAPHOPT_STRICT", "")
    if strict not in ("", "0", "1"):
        raise ConfigError(f"GRAPHOPT_STRICT is {strict!r}", remedy="use 1 to raise on errors, 0 to fall back")
    return replace(config, on_error="raise") if strict == "1" else config


def _apply(config: Config, settings: Mapping[str, Any], prefix: str) -> Config:
    known = [f.name for f in fields(Config)]
    for key, value in settings.items():
        if key not in known:
            remedy = _nearest(prefix + key, [prefix + k for k in known])
            raise ConfigError(f"unknown option {prefix + key!r}", remedy=remedy)
        if key in CHOICES and value not in CHOICES[key]:
            raise ConfigError(
                f"option {prefix + key!r} is {value!r}", remedy=f"use one of {', '.join(map(repr, CHOICES[key]))}"
            )
        if key == "verify" and not isinstance(value, bool):
            raise ConfigError(f"option {prefix + key!r} is {value!r}", remedy="use True or False")
        if key == "dsa" and not isinstance(value, Request):
            value = _request(prefix + key, value)
        if key in ("rules", "disable", "experimental"):
            if value is not None:
                if not isinstance(value, Iterable) or isinstance(value, (str, Mapping)) or not all(
                        isinstance(v, str) for v in value):
                    raise ConfigError(f"option {prefix + key!r} is {value!r}", remedy="give a list of names")
                value = tuple(value)
                _check_rules(prefix + key, value)
            elif key != "rules":
                value = ()
        if key == "mode" and value is not None and value not in _compat.inductor_mode_names():
            raise ConfigError(f"unknown mode {value!r}", remedy=_nearest(str(value), _compat.inductor_mode_names()))
        config = replace(config, **{key: value})
    return config


def _request(option: str, given: Any) -> Request | None:
    """`graphopt.dsa` as a Request; None or False switch it off."""
    if given is None or given is False:
        return None
    if not isinstance(given, Mapping):
        raise ConfigError(f"option {option!r} is {given!r}", remedy='give a dict, for example {"window": (3, 7, 7)}')
    known = [f.name for f in fields(Request)]
    for key in given:
        if key not in known:
            raise ConfigError(f"unknown key {key!r} in option {option!r}", remedy=_nearest(str(key), known))
    values = dict(given)
    for key in ("window", "grid"):
        value = values.get(key)
        if key in values and not (key == "grid" and value in (None, "auto")):
            values[key] = _triple(f"{option}: {key}", value)
    if values.get("grid") == "auto":
        values["grid"] = None
    for key, kind, what in (("select", str, "names of modules (globs)"), ("keep_dense", int, "positions of layers")):
        value = values.get(key)
        if value is None:
            values.pop(key, None)
            continue
        listed = (value,) if isinstance(value, kind) else value
        if not isinstance(listed, (list, tuple)) or not all(
                isinstance(v, kind) and not isinstance(v, bool) for v in listed):
            raise ConfigError(f"{option}: {key} is {value!r}", remedy=f"give a list of {what}")
        values[key] = tuple(listed)
    for key, allowed in (("boundary", ("inside", "border")), ("text", ("none", "first", "last"))):
        if key in values and values[key] not in allowed:
            raise ConfigError(f"{option}: {key} is {values[key]!r}",
                              remedy=f"use one of {', '.join(map(repr, allowed))}")
    return Request(**values)


def _triple(what: str, value: Any) -> tuple[int, int, int]:
    try:
        t, h, w = map(operator.index, value)  # 3.5 is no size, and a text no three of them
    except (TypeError, ValueError):
        raise ConfigError(f"{what} is {value!r}", remedy="give three whole numbers (t, h, w)") from None
    if min(t, h, w) < 1:
        raise ConfigError(f"{what} is {value!r}", remedy="give three sizes of at least 1")
    return t, h, w


def _check_rules(option: str, names: tuple[str, ...]) -> None:
    known = catalogue.names()
    if option.endswith("experimental"):
        known = catalogue.EXPERIMENTAL
    elif not option.endswith("rules"):
        known |= catalogue.BESIDE | catalogue.EXPERIMENTAL | catalogue.LATE
    for name in names:
        if name not in known:
            remedy = _nearest(name, sorted(known))
            raise ConfigError(f"{option} names an unknown rule {name!r}", remedy=remedy)


def _check_inductor_keys(rest: Mapping[str, Any], config: Config) -> None:
    if not rest:
        return
    known = set(_compat.inductor_option_names())
    for key, value in rest.items():
        if key.replace("-", "_") not in known:
            candidates = [*known, *(PREFIX + f.name for f in fields(Config))]
            raise ConfigError(f"unknown option {key!r}", remedy=_nearest(key, candidates))
        kind = _compat.inductor_option_type(key.replace("-", "_"))
        if not isinstance(value, kind):
            raise ConfigError(f"option {key!r} is {value!r}", remedy=f"Inductor takes {_words(kind)} here")
    if config.compiler != "inductor":
        raise ConfigError(
            f"option {next(iter(rest))!r} is Inductor's, but graphopt.compiler is {config.compiler!r}",
            remedy="leave it out, or compile with Inductor",
        )


def _words(kind: Any) -> str:
    return getattr(kind, "__name__", str(kind))


def _nearest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    if not close:  # `rules` for `graphopt.rules`
        close = [k for k in known if k.endswith("." + word)][:1]
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(sorted(known)[:12])}"
