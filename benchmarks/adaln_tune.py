"""Configurations of the AdaLN kernels, measured one by one: where the closed form of codegen/configure.py comes from.

    python benchmarks/adaln_tune.py [--cases F1f:1x32760x1536,F2b:2x16384x3072] [--seconds 200] [--out FOLDER]

A case is a fusion of `FORMS`, a direction and a shape.  f and b are the forward and the backward kernel, s the second
stage of the backward: the time of both stages less the first's.  The closed form is measured first, marked `*`, then
its neighbours (`--only`: it alone).  Times are CUDA-graph replays of one kernel, bf16 activations, fp32 factors;
`share` is the floor (bytes of every [B, N, D] tensor it reads or writes, over the measured copy bandwidth) over the
time.  Prints the best configurations and writes results/<machine>/adaln_tune.json.  `--write` also puts those that
beat the closed form by over 1.5 %, measured once more beside it, into the user's table (codegen/tuned.py), `--ship`
into the one of the package.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from _results import copy_tb_per_s, save
from _timing import replayed

from graphopt.codegen import kernels, store, tuned
from graphopt.codegen.configure import Configuration, closed_form, cut
from graphopt.codegen.emit import emit
from graphopt.codegen.emit_sums import Tile, emit_sums, tile

CASES = ("F1f:8x4096x1152,F1b:8x4096x1152,F2f:8x4096x1152,F2b:8x4096x1152,F1f:1x32760x1536,F1b:1x32760x1536,"
         "F2f:1x32760x1536,F2b:1x32760x1536,F1f:2x16384x3072,F1b:2x16384x3072,F2f:2x16384x3072,F2b:2x16384x3072,"
         "F1f:1x75600x5120,F1b:1x75600x5120,F2f:1x75600x5120,F2b:1x75600x5120")


@dataclass(frozen=True)
class Form:
    """What a fusion is made of; "t" factors have one row per token, "h" ones are bf16."""

    outputs: str = "scale+shift"
    gate: bool = True
    norm: str = "layer_norm"
    branch_norm: str = "none"
    affine: bool = False
    per_token: bool = False
    half: bool = False


FORMS = {
    "F1": Form(gate=False), "F2": Form(), "F2a": Form(outputs="plain", affine=True),
    "F3": Form(outputs="", norm="none"), "F4": Form(outputs="scale+shift scale+shift", gate=False),
    "F1r": Form(gate=False, norm="rms_norm", outputs="scale"),
    "F5": Form(outputs="scale", norm="rms_norm", branch_norm="rms_norm"),
    "F1t": Form(gate=False, per_token=True), "F2t": Form(per_token=True),
    "F1h": Form(gate=False, half=True), "F2h": Form(half=True),
}


class Case:
    """One kernel of one form on one shape."""

    def __init__(self, text: str) -> None:
        self.text = text
        code, shape = text.split(":")
        self.form, self.direction = FORMS[code[:-1]], code[-1]
        self.B, self.N, self.D = map(int, shape.split("x"))
        self.sms = torch.cuda.get_device_properties(0).multi_processor_count
        self.prepare()
        self.base = closed_form(self.spec)
        if self.direction == "s":
            best = tile(self.D, self.programs(self.base) // self.B)
            self.base = replace(self.base, blocks=(best.rows, best.columns), warps=best.warps)

    def prepare(self) -> None:
        """Random operands, the spec and the plan."""
        B, N, D, f = self.B, self.N, self.D, self.form
        new = lambda: torch.randn(B, N, D, device="cuda", dtype=torch.bfloat16)
        kind = torch.bfloat16 if f.half else torch.float32
        factor = lambda: 0.3 * torch.randn(B, N if f.per_token else 1, D, device="cuda", dtype=kind)
        vector = lambda there: torch.ones(D, device="cuda", dtype=kind) if there else None
        gated, normed = f.gate, f.norm != "none"
        x, branch, gate = new(), new() if gated else None, factor() if gated else None
        modulation = [factor() for word in f.outputs.split() if word != "plain" for _ in word.split("+")]
        branch_normed = f.branch_norm != "none"
        weight, bias = vector(f.affine), vector(f.affine)
        front = (gate, None, vector(branch_normed), None, weight, bias, modulation, f.outputs, f.norm)
        bf, activation = torch.bfloat16, "tanh" if branch_normed else "identity"
        if self.direction == "f":
            prepared = kernels.prepare_forward(
                x, branch, *front, 1e-6, 1.0, f.branch_norm, 1e-6, activation, bf, bf, ""
            )
        else:
            dys = [new() for _ in f.outputs.split()] if normed else []
            prepared = kernels.prepare_backward(new() if gated else None, dys, x, branch, *front, 1.0, f.branch_norm,
                                                activation, bf)
        self.spec, self.plan, self.given = prepared
        empty = lambda dtype: torch.empty(B, N, D, device="cuda", dtype=dtype)
        self.outs = [empty(self.spec.dtype(t)) for t in self.spec.rows_out]
        self.statistics = [torch.ones(B * N, device="cuda") for _ in self.spec.statistics]

    @property
    def floor_bytes(self) -> int:
        """Bytes of every [B, N, D] tensor read or written; of the partial sums for a second stage."""
        if self.direction == "s":
            return 4 * len(self.spec.sums) * self.D * self.programs(closed_form(self.spec))
        s = self.spec
        streams = (*s.rows_in, *s.rows_out, *(f for f in s.factors if s.per_token(f)))
        return sum(s.dtype(t).itemsize for t in streams) * self.B * self.N * self.D

    def programs(self, config: Configuration) -> int:
        """Programs of a persistent kernel."""
        return self.B * max(1, min(self.sms * config.programs_per_sm // self.B, (self.N + 3) // 4))

    def launch(self, config: Configuration) -> Callable[[], Any]:
        """A launch with this configuration."""
        if self.direction != "s":
            return self.main(config)
        s, B, D = self.spec, self.B, self.D
        first, partial = self.main(closed_form(s)), self.partial
        results = tuple((f"d{f}", k * D, torch.float32) for k, f in enumerate(s.sums))
        name = f"{s.name}_sums"
        source = emit_sums(name, D, len(s.sums) * D, results, Tile(*config.blocks, config.warps))
        outs = [torch.empty(B, D, device="cuda") for _ in results]
        grid = (-(-D // config.blocks[1]) * len(outs) * B,)
        kernel = getattr(store.load(name, source), name)
        per_group = partial.shape[0] // B

        def both() -> None:
            first()
            kernel[grid](partial, *outs, per_group, num_warps=config.warps)

        return both

    def main(self, config: Configuration) -> Callable[[], Any]:
        """A launch of the forward kernel, or of the backward's first stage, whose sums then go to `self.partial`."""
        s, B, N, D = self.spec, self.B, self.N, self.D
        kernel = getattr(store.load(s.function, emit(s, config)), s.function)
        args = [self.given[t] for t in (*s.rows_in, *s.factors)] + self.outs + self.statistics
        if self.direction == "f":
            P = -(-N // config.rows)
            sizes, grid = ([N, P], (B * P,)) if config.rows > 1 else ([N], (B * N,))
        else:
            grid = (self.programs(config),)
            sizes = [N, grid[0] // B]
            self.partial = torch.empty(grid[0], len(s.sums) * D, device="cuda")
            args += [self.partial] if s.sums else []
        strides = kernels._strides(s, self.plan)
        return lambda: kernel[grid](*args, *sizes, *strides, num_warps=config.warps)

    def time(self, config: Configuration) -> float:
        """Microseconds of a launch; of the second stage alone, 0.1 at least."""
        us = replayed(self.launch(config), warmup=4, rep=25)
        if self.direction == "s":
            us = max(0.1, us - replayed(self.main(closed_form(self.spec)), warmup=4, rep=25))
        return us

    def neighbours(self) -> list[Configuration]:
        """Configurations near the closed form."""
        D, base, found = self.D, self.base, []
        if self.direction == "s":
            shapes = ((64, 32), (128, 16), (128, 32), (256, 16), (256, 32), (64, 64), (128, 64), (64, 16), (32, 128))
            return [replace(base, blocks=shape, warps=w) for shape in shapes for w in (4, 8)]
        if self.direction == "f":
            for warps in (1, 2, 4, 8):
                if D // warps <= 2048:
                    found += [Configuration(cut(D, lane * warps), warps, 0, 0) for lane in (256, 128)]
            for warps, width in ((1, 256), (1, 128), (2, 512), (4, 1024), (4, 512), (8, 2048)):
                if D // warps <= 1600:
                    found += [Configuration(cut(D, width), warps, stages, 0, rows)
                              for rows, stages in ((2, 3), (4, 3), (4, 4), (4, 5), (3, 3), (8, 3), (8, 4))]
            return found
        s = self.spec
        row_bytes = D * sum(s.dtype(t).itemsize for t in (*s.rows_in, *(f for f in s.factors if s.per_token(f))))
        equal = lambda width: (width,) * -(-D // width)
        for joint in (base.joint, not base.joint):
            for warps in sorted({max(1, base.warps // 2), base.warps, min(16, base.warps * 2)}):
                widths = (256 * warps, 128 * warps)
                for blocks in sorted({c(w) for w in widths for c in (equal, lambda w: cut(D, w))}):
                    for per_sm in range(max(1, base.programs_per_sm - 1), base.programs_per_sm + 3):
                        for stages in range(3, base.stages + 4):
                            ring = (stages - 1) * per_sm * row_bytes
                            if (36e3 < ring < 125e3 or stages == 3) and ring < 220e3 and D / warps < 1700:
                                found.append(Configuration(blocks, warps, stages, per_sm, joint=joint))
            found += [replace(base, joint=joint, stages=0), replace(base, joint=joint, stages=0, programs_per_sm=4)]
            if not s.sums:  # nothing binds rows to programs
                found += [replace(base, joint=joint, stages=stages, programs_per_sm=per_sm)
                          for stages in (0, 3) for per_sm in (2, 4, 8, 16, 32)]
        return found

    def candidates(self, most: int) -> list[Configuration]:
        """The closed form, then its neighbours, those that differ least first; `most` of them in all."""
        own = asdict(self.base)
        differs = lambda c: sum(value != own[name] for name, value in asdict(c).items())
        near = sorted(self.neighbours(), key=differs) if most > 1 else []
        return list(dict.fromkeys([self.base, *near]))[:most]


def warm(cases: list[str], most: int, i: int, n: int) -> None:
    """Compile every n-th configuration of every case, from the i-th, by running it once."""
    for text in cases:
        case = Case(text)
        for config in case.candidates(most)[i::n]:
            try:
                case.launch(config)()
                torch.cuda.synchronize()
            except Exception as error:
                print(f"  {text} {config}: {type(error).__name__} {str(error)[:120]}", flush=True)


GAIN = 1.015  # a measured configuration must beat the closed form by more


def better(case: Case, rows: list[tuple[float, float, Configuration]]) -> Configuration | None:
    """The best configuration if it beats the closed form, both measured again in turns; None if it does not."""
    best = [c for _, _, c in sorted(rows, key=lambda r: r[1])[:3]]
    times: dict[Configuration, list[float]] = {c: [] for c in dict.fromkeys([case.base, *best])}
    for _ in range(3):
        for c, found in times.items():
            found.append(case.time(c))
    middle = {c: sorted(found)[1] for c, found in times.items()}
    winner = min(middle, key=middle.__getitem__)
    print(f"   closed form {middle[case.base]:.1f} us, best {middle[winner]:.1f} us", flush=True)
    return winner if middle[winner] * GAIN < middle[case.base] else None


def main(argv: list[str] | None = None) -> None:
    """Tune what `argv` (default: the command line) says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--only", action="store_true", help="measure the closed form alone")
    parser.add_argument("--most", type=int, default=200, help="configurations per case at most")
    parser.add_argument("--seconds", type=float, default=200.0, help="time for all cases together")
    parser.add_argument("--workers", type=int, default=12, help="processes that fill Triton's cache first")
    parser.add_argument("--show", type=int, default=6, help="configurations printed per case")
    parser.add_argument("--write", action="store_true", help="put the winners into the user's table")
    parser.add_argument("--ship", action="store_true", help="put the winners into the package's table")
    parser.add_argument("--warm", help="what a worker does: its share, as i/n")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    cases = args.cases.split(",")
    most = 1 if args.only else args.most
    if args.warm:
        warm(cases, most, *map(int, args.warm.split("/")))
        return
    start = time.time()
    if args.workers:
        command = [sys.executable, __file__, "--cases", args.cases, "--most", str(most), "--warm"]
        running = [subprocess.Popen([*command, f"{i}/{args.workers}"]) for i in range(args.workers)]
        for process in running:
            process.wait()
    bandwidth = copy_tb_per_s()
    print(f"compiled in {time.time() - start:.0f} s; copy {bandwidth:.3f} TB/s", flush=True)
    end = time.time() + args.seconds
    for k, text in enumerate(cases):
        case = Case(text)
        floor = case.floor_bytes / bandwidth / 1e6
        limit = time.time() + (end - time.time()) / (len(cases) - k)
        rows: list[tuple[float, float, Configuration]] = []
        for config in case.candidates(most):
            if rows and time.time() > limit:
                break
            try:
                us = case.time(config)
            except Exception as error:
                print(f"  {config}: {type(error).__name__} {str(error)[:120]}", flush=True)
                continue
            rows.append((floor / us, us, config))
        print(f"== {text}: floor {floor:.1f} us, {len(rows)} configurations", flush=True)
        best = sorted(rows, key=lambda r: -r[0])[:args.show]
        for share, us, c in best + [r for r in rows if r[2] == case.base and r not in best]:
            print(f" {'*' if c == case.base else ' '} {share:.3f} {us:8.1f} us  w{c.warps} st{c.stages} "
                  f"per{c.programs_per_sm} rows{c.rows} j{int(c.joint)} {'+'.join(map(str, c.blocks))}", flush=True)
        if (args.write or args.ship) and case.direction != "s" and (winner := better(case, rows)) is not None:
            table = Path(kernels.__file__).parent / tuned.SHIPPED if args.ship else None
            tuned.write(torch.cuda.get_device_name(), {tuned.key(case.spec): winner}, table)
        done = [dict(case=text, us=us, share=share, closed_form=c == case.base, **asdict(c)) for share, us, c in rows]
        save("adaln_tune", done, ("case", "blocks", "warps", "stages", "programs_per_sm", "rows", "joint"),
             {"copy_tb_per_s": bandwidth}, args.out)
        del case
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
