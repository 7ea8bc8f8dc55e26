"""Plans with measured steps on the benchmark page: ranks in turn on one GPU, and several GPUs."""

from __future__ import annotations

from report_parts import Results, Row, Section, number, table


def policy_order(r: Row) -> tuple:
    """How rows of plans are sorted."""
    return r["data"], r["system"], r["ranks"], r["tau"], r["policy"]


def predicted(r: Row, rows: list[Row]) -> list[str]:
    """Cells of a plan that was simulated with a measured fit."""
    per_cent = lambda value, digits=3: number(100 * value, digits)
    base = next((x["tokens_per_s"] for x in rows if policy_order(x) == (*policy_order(r)[:-1], "equal_token")), None)
    return [r["data"], r["system"], str(r["ranks"]), str(r["tau"]), r["policy"], str(r["steps"]),
            number(r["tokens_per_s"], 4), number(r["tokens_per_step"], 4),
            "-" if base is None or r["policy"] == "equal_token" else per_cent(r["tokens_per_s"] / base - 1),
            per_cent(r["zero_bubble_gain"]), per_cent(r["limit_fraction"]), per_cent(r["bubble"], 2),
            per_cent(r["step_cv"], 2), per_cent(r["load_cv"], 2)]


def several(results: Results) -> Section | None:
    """Plans in a training loop on several GPUs: gains, gradients, memory, a rank that dies."""
    steps = [(f, r) for f, r in results.rows("schedule", check="step", mode="measured") if r.get("tokens_per_s")]
    more = {c: list(results.rows("schedule", check=c)) for c in ("grads", "memory", "drill")}
    files = sorted({f for f, _ in [*steps, *(x for found in more.values() for x in found)]})
    if not files:
        return None
    per_cent = lambda value, digits=3: "-" if value is None else number(100 * value, digits)
    span = lambda x: "-" if not x else f"{per_cent(x[0])} to {per_cent(x[1])}"
    parts = ["Step times on the device; steps of the policies take turns. Gain: tokens/s over equal_token (a random "
             "bucket per rank), with the 95 % interval over the steps; without waiting: what the simulator gives a "
             "plan in which no rank waits, over the same steps."]
    lines = [[r["data"] + (", recomputed" if r.get("checkpoint") else ""), r["system"], str(r["ranks"]),
              str(r["tau"]), r["policy"], str(r["steps"]), number(r["tokens_per_s"], 4),
              number(r.get("tokens_per_step"), 4), per_cent(r.get("gain_over_equal_token")),
              span(r.get("gain_interval")), per_cent(r.get("zero_bubble_gain_steps")),
              per_cent(r.get("share_of_zero_bubble_gain")),
              per_cent(r["limit_fraction"]), per_cent(r["bubble"], 2), per_cent(r.get("mape"), 2),
              per_cent(r.get("step_cv"), 2), per_cent(r.get("load_cv"), 2), str(r.get("oom", "-")),
              str(r.get("graphs", "-"))]
             for _, r in sorted(steps, key=lambda x: policy_order(x[1]))]
    if lines:
        parts.append(table(["data", "system", "ranks", "tau", "policy", "steps", "tokens/s", "tokens per step",
                            "gain, %", "interval", "without waiting, %", "share of it, %", "busy / wall, %",
                            "waiting, %", "error of prediction, %", "CV of steps, %", "CV of loads, %", "out of memory",
                            "graphs"], lines))
    told = [r for _, r in results.rows("schedule", check="step", mode="simulated with the fit")]
    if told:
        parts += ["**Predicted, not measured**: the same policies on whole plans for these numbers of ranks, "
                  "simulated with the costs fitted on the machine above and 3 % noise. A step's overhead, "
                  "communication in it, is that of the fit's number of ranks. Gain: over equal_token; without waiting: "
                  "the same if no rank ever waited.",
                  table(["data", "system", "ranks", "tau", "policy", "steps", "tokens/s", "tokens per step", "gain, %",
                         "without waiting, %", "busy / wall, %", "waiting, %", "CV of steps, %", "CV of loads, %"],
                        [predicted(r, told) for r in sorted(told, key=policy_order)])]
    if more["grads"]:
        by = lambda x: [str(x[1].get(k)) for k in ("system", "mode", "data")]
        parts += ["Gradients of ranks that run unequal counts of microbatches, against one process that is wrapped and "
                  "compiled alike, and one that is not wrapped: largest relative error over parameters and steps.",
                  table(["system", "wrapper, precision", "counts", "ranks", "error", "parameter", "unwrapped", "in"],
                        [[r.get("system") or "-", r["mode"], r["data"], str(r["ranks"]), f"{r['error']:.1e}",
                          r.get("parameter") or "-", f"{r.get('error_unwrapped', r['error']):.1e}",
                          r.get("parameter_unwrapped") or "-"] for _, r in sorted(more["grads"], key=by)])]
    if more["memory"]:
        parts += ["Peak memory of a step of three microbatches under FSDP2: parameters kept over the step, or gathered "
                  "for each microbatch.",
                  table(["", "layers", "ranks", "peak, GiB"],
                        [[f"{r['mode']}, {r['data']}", str(r["layers"]), str(r["ranks"]), number(r["peak_gib"], 3)]
                         for _, r in more["memory"]])]
    if more["drill"]:
        parts += ["One rank dies in the middle of a step.",
                  table(["started by", "over", "until all had stopped, s", "resumed: same rows, same weights"],
                        [[r["mode"], r["system"], number(r["seconds_to_stop"], 2),
                          f"{r['same_rows']}, {r['same_weights']}".replace("True", "yes").replace("False", "no")]
                         for _, r in more["drill"]])]
    return Section("Plans on several GPUs", files, "\n\n".join(parts))


def whole(r: Row) -> str:
    """A policy, and whose plan it has."""
    return r["policy"] + (f" (the plan of {r['same_plan_as']})" if r.get("same_plan_as") else "")


def in_turn(results: Results) -> Section | None:
    """Ranks of a plan one after the other on one GPU, beside the simulator's prediction for the same steps."""
    found = [(f, r) for f, r in results.rows("schedule_in_turn", mode="in turn") if r.get("tokens_per_s")]
    fits = [r for _, r in results.rows("schedule_in_turn", mode="fit")]
    if not found:
        return None
    per_cent = lambda value, digits=3: "-" if value is None else number(100 * value, digits)
    span = lambda x: "-" if not x else f"{per_cent(x[0])} to {per_cent(x[1])}"
    data = lambda r: r["data"] + (", recomputed" if r.get("checkpoint") else "") + f", {r['layers']} layers"
    limit = lambda r: f"{r['m_mem']:,}"
    order = lambda r: (r["data"], r["ranks"], r["tau"], r["memory"], r["system"], r["policy"])
    rows = sorted((r for _, r in found), key=order)
    head = ["data", "ranks", "tau", "memory", "policy", "steps"]
    cells = lambda r: [data(r), str(r["ranks"]), str(r["tau"]), limit(r), whole(r), str(r["steps"])]
    own = [r for r in rows if "mape" in r]
    text = ["**Composed, not run**: one process runs the microbatches of all ranks of a plan, rank by rank, without "
            "collectives and without the optimizer; a step takes as long as its slowest rank. Communication, and what "
            "several GPUs and hosts differ by, are not in it. Wan at 1.3B widths, FSDP2's modules, bf16, blocks "
            "compiled by graphopt, every policy at the same global batch (as far as a microbatch allows), steps of "
            "policies and cases in turn. Predicted: by the fit made before the steps, without noise, over the same "
            "steps. Gain: tokens/s over equal_token, with the 95 % interval over the steps; without waiting: of a "
            "plan in which no rank waits. Memory: tokens of a microbatch.",
            table([*head, "busy / slowest, %", "predicted", "gain, %", "interval", "predicted", "without waiting",
                   "share of it, %", "interval", "error of steps, %", "of ranks, %"],
                  [[*cells(r), per_cent(r["limit_fraction"]), per_cent(r["predicted_limit_fraction_steps"]),
                    per_cent(r.get("gain_over_equal_token")), span(r.get("gain_interval")),
                    per_cent(r.get("planned_gain_steps")), per_cent(r.get("zero_bubble_gain_steps")),
                    *([per_cent(r.get("share_of_zero_bubble_gain")), span(r.get("share_interval"))]
                      if r["policy"] == "step_balanced" else ["-", "-"]),
                    per_cent(r["mape"], 2), per_cent(r["mape_ranks"], 2)] for r in own]),
            "Steps of two policies hold different samples. Of the whole plan: the gain the fit predicts, the same "
            "times what the measured steps had over their own prediction, and that of a plan without waiting.",
            table([*head, "tokens/s", "tokens per step", "CV of loads, %", "of steps, %", "gain of the plan, %",
                   "corrected", "interval", "without waiting", "share, %", "noise, %", "out of memory", "graphs",
                   "peak, GiB", "GPU idle"],
                  [[*cells(r), number(r["tokens_per_s"], 4), number(r["tokens_per_step"], 4),
                    per_cent(r["load_cv"], 2), per_cent(r["step_cv"], 2), per_cent(r.get("planned_gain")),
                    per_cent(r.get("planned_gain_corrected")), span(r.get("planned_gain_interval")),
                    per_cent(r.get("zero_bubble_gain")),
                    per_cent(r.get("share_of_zero_bubble_gain_corrected")) if r["policy"] == "step_balanced" else "-",
                    per_cent(r.get("noise"), 2), str(r["oom"]), str(r.get("graphs", "-")),
                    number(r.get("peak_gib"), 3), f"{r['starved']} of {sum(x[4] for x in r['microbatch_s'])}"]
                   for r in own]),
            "Noise: spread of a shape's microbatches. GPU idle: microbatches before which the host had fallen behind. "
            "Fits: " + "; ".join(f"{r['data']}, {r['layers']} layers: {r['shapes']} shapes, mean error "
                                 f"{per_cent(r['mape'], 2)} %, p = {r['p']:.2f}" for r in fits) + "."]
    other = [r for r in rows if any(k.startswith("time_over") and k != "time_over_interval" for k in r)]
    if other:
        base = next(k for k in other[0] if k.startswith("time_over") and k != "time_over_interval")
        text += ["The same microbatches with other kernels: time over graphopt's.",
                 table([*head, "system", "time", "interval", "gain over its equal_token, %"],
                       [[*cells(r), r["system"], f"{r[base]:.3f}",
                         "{:.3f} to {:.3f}".format(*r["time_over_interval"]),
                         per_cent(r.get("gain_over_equal_token"))] for r in other])]
    failed = [r for _, r in results.rows("schedule_in_turn") if r.get("error")]
    if failed:
        names = ", ".join(f"{data(r)}, {r['ranks']} ranks, {r['policy']}" for r in failed)
        text.append(f"Out of memory at the first step: {names}.")
    return Section("The ranks of a plan in turn, on one GPU", sorted({f for f, _ in found}), "\n\n".join(text))
