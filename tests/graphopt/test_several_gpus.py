"""benchmarks/several_gpus.sh: every job compiles at once, and measures alone and in turn."""

import itertools
import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "several_gpus.sh"
# Stands for python3: a job of schedule_step.py says when it compiles, waits as the script does, and says when it
# measures; the others just run.
PYTHON = r"""#!/usr/bin/env bash
name=run compiled= after=
[[ "$*" == *"--steps 50,20"*"--tau 1.3 --steps 50 --out"* ]] && echo options >> "$EVENTS"
while [ $# -gt 0 ]; do
    case $1 in
        --compiled) compiled=$2; name=$(basename "$2" .compiled); shift ;;
        --after) after=$2; shift ;;
        --system) [ "$2" = rewritten ] && sleep 0.2; shift ;;
        */schedule_drill.py) name=drill ;;
        */schedule_grads.py) name=gradients ;;
    esac
    shift
done
echo "compile $name" >> "$EVENTS"
sleep 0.1
[ -z "$compiled" ] || touch "$compiled"
for f in ${after//,/ }; do until [ -e "$f" ]; do sleep 0.02; done; done
echo "begin $name" >> "$EVENTS"
sleep 0.1
echo "end $name" >> "$EVENTS"
[ "$name" != unfused ]  # one that fails must not hold up the next
"""


def run(tmp_path, *jobs, options=""):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").write_text(PYTHON)
    (tmp_path / "bin" / "python3").chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "RANKS": "2", "EVENTS": str(tmp_path / "events"),
           "OPTIONS": options}
    done = subprocess.run(["bash", str(SCRIPT), str(tmp_path / "out"), *jobs], env=env, capture_output=True, text=True, timeout=60)
    return done, (tmp_path / "events").read_text().splitlines()


def test_all_compile_first_and_then_measure_in_turn(tmp_path):
    done, events = run(tmp_path)
    assert done.returncode == 0, done.stderr
    measured = ["policies", "unfused", "long", "long_tau_2"]
    begins = {m: events.index(f"begin {m}") for m in measured}
    assert sorted(begins, key=begins.get) == measured
    first = min(begins.values())
    assert all(events.index(f"compile {m}") < first for m in measured)
    assert all(events.index(f"end {a}") < begins[b] for a, b in itertools.pairwise(measured))
    # What is not timed is over before anything is.
    assert all(i < first for i, e in enumerate(events) if e in ("end gradients", "end drill"))
    assert events.count("end gradients") == 4  # two precisions, without Inductor, memory
    assert "unfused: exit code 1" in done.stdout
    logs = {f.stem for f in (tmp_path / "out" / "logs").iterdir()}
    assert {"gradients_fp32", "gradients_bf16", "gradients_rewritten", "memory", "drill", *measured} == logs


def test_some_jobs_and_an_unknown_one(tmp_path):
    done, events = run(tmp_path, "policies", "nothing", options="--tau 1.3 --steps 50")
    assert "options" in events, "the last of each counts"
    assert [e for e in events if e.startswith("end")] == ["end policies"]
    assert "unknown job nothing" in done.stderr
