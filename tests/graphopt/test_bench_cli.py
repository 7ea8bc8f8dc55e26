"""`graphopt bench`: names, GPUs it needs, exit codes, result files, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from graphopt import _bench_cli
from graphopt.errors import ConfigError

SCRIPT = """
import sys, time
from pathlib import Path
sys.path.insert(0, {benchmarks!r})
import _results
sys.argv[0] = "toy.py"
_results.save("toy", [{{"case": a, "ms": 1.0}} for a in sys.argv[1:]], ("case",), {{}})
print("saved", flush=True)
if "wait" in sys.argv:
    time.sleep(60)
sys.exit(3 if "fail" in sys.argv else 0)
"""


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A folder of benchmarks that holds one script."""
    (tmp_path / "_results.py").write_text("")
    (tmp_path / "toy.py").write_text(SCRIPT.format(benchmarks=str(_bench_cli.folder())))
    return tmp_path


SLEEPING = """
import os, sys, time
open(os.environ["GRAPHOPT_RESULTS"], "w").close()
try:
    time.sleep(60)
except KeyboardInterrupt as e:
    {}
"""
SWALLOWED = "time.sleep(60)  # as an optional import in `try` does it"
TURNED = "raise ImportError('initialization failed') from e  # as an extension module does it"


def run(toy: Path, *arguments: str) -> subprocess.Popen:
    code = ("import sys; from pathlib import Path; from graphopt import _bench_cli as b, cli; "
            f"b.folder = lambda: Path({str(toy)!r}); b.BENCHMARKS = {{'toy': b.Benchmark('toy', 'a toy', 0, 1)}}; "
            "sys.argv = ['graphopt', 'bench', *sys.argv[1:]]; cli.main()")
    env = {**os.environ, "GRAPHOPT_RESULTS": str(toy / "out")}
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, env=env, start_new_session=True)


def test_every_script_exists_and_says_what_it_measures() -> None:
    for name, entry in _bench_cli.BENCHMARKS.items():
        assert (_bench_cli.folder() / f"{entry.script}.py").is_file(), name
        assert f"{name} " in _bench_cli.table()


def test_an_unknown_name_and_too_few_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="did you mean 'step'"):
        _bench_cli.command("stepp", [])
    monkeypatch.setattr(_bench_cli, "gpu_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"needs 2 GPU\(s\), torch sees 1"):
        _bench_cli.command("schedule-step", [])
    monkeypatch.setattr(_bench_cli, "gpu_count", lambda: 4)
    line = _bench_cli.command("schedule-step", ["--layers", "2"])
    assert "--nproc-per-node=4" in line
    assert line.count(str(Path(_bench_cli.__file__).with_name("_script.py"))) == 2  # the launcher's and each rank's
    assert line[-2:] == ["--layers", "2"]


def test_rows_as_json_and_the_scripts_exit_code(toy: Path) -> None:
    child = run(toy, "toy", "first", "--json")
    out, err = child.communicate(timeout=120)
    assert child.returncode == 0, err
    (result,) = json.loads(out)
    assert "saved" in err  # what the script prints
    assert result["name"] == "toy"
    assert [r["case"] for r in result["rows"]] == ["first"]
    child = run(toy, "toy", "fail")
    _, err = child.communicate(timeout=120)
    assert child.returncode == 3
    assert "exit code 3" in err
    child = run(toy, "--all", "fail")
    _, err = child.communicate(timeout=120)
    assert child.returncode == 2
    assert "--all takes neither" in err


def test_ctrl_c_ends_with_130_and_keeps_rows(toy: Path) -> None:
    child = run(toy, "toy", "wait")
    for _ in range(600):
        if list((toy / "out").glob("*/toy.json")):
            break
        time.sleep(0.1)
    time.sleep(0.2)
    os.killpg(child.pid, signal.SIGINT)
    child.communicate(timeout=60)
    assert child.returncode == 130
    (file,) = (toy / "out").glob("*/toy.json")
    assert json.loads(file.read_text())["rows"][0]["case"] == "wait"


@pytest.mark.parametrize(("script", "module"), [("import slow", SLEEPING.format(SWALLOWED)), (SLEEPING.format(TURNED), "")])
def test_ctrl_c_while_a_script_imports_is_one_line(toy: Path, script: str, module: str) -> None:
    (toy / "toy.py").write_text(script)
    (toy / "slow.py").write_text(module)
    child = run(toy, "toy")
    for _ in range(600):
        if (toy / "out").exists():
            break
        time.sleep(0.1)
    os.killpg(child.pid, signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "Traceback" not in err
    assert "interrupted; rows saved so far stay" in err


@pytest.mark.parametrize("held", [True, False])
def test_a_script_runs_as_its_own_main(tmp_path: Path, held: bool) -> None:
    """Arguments, name, folder and exit code as `python script.py` gives them; a Ctrl-C held back ends it at once."""
    script = tmp_path / "own.py"
    script.write_text("import sys\nimport beside\nprint(__name__, sys.argv)\nsys.exit(7)\n")
    (tmp_path / "beside.py").write_text("")
    runner = [sys.executable, str(Path(_bench_cli.__file__).with_name("_script.py"))]
    if held:
        block = "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}); "
        act = "os.kill(os.getpid(), signal.SIGINT); os.execv(sys.executable, sys.argv[1:])"
        runner = [sys.executable, "-c", block + act, *runner]
    done = subprocess.run([*runner, str(script), "a", "-b"], capture_output=True, text=True, check=False)
    if held:
        assert (done.returncode, done.stdout) == (130, "")
        assert "Traceback" not in done.stderr
    else:
        assert (done.returncode, done.stdout) == (7, f"__main__ {[str(script), 'a', '-b']}\n")
