"""Build wheel and sdist, install each in a clean environment, and check the top-level names they install.

Run by `make dist-check`.  torch is not installed again: the check sees the environment's site-packages.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# what pyproject.toml lists; tests/contracts/test_layout.py compares the list with the tree
PACKAGES = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
PROBE = """
import graphopt, graphopt.passes.catalogue, graphopt.schedule, graphopt.codegen.operators
import torch._dynamo, pathlib
assert "graphopt" in torch._dynamo.list_backends()
assert pathlib.Path(graphopt.__file__).with_name("py.typed").exists()
from graphopt.schedule import site_cost
assert site_cost.predict("norm_modulate", {"forward": 1e6, "backward": 2e6}, 1024, True)[0] > 0
from graphopt.reporting import Report
assert Report().to_html("report.html").startswith("<!doctype html>")
for name in ("passes", "codegen", "schedule"):
    try:
        __import__(name)
    except ImportError:
        continue
    raise SystemExit(f"a top-level package {name} was installed")
print("installed", graphopt.__file__)
"""


def call(*args: str | Path, cwd: Path) -> None:
    subprocess.run([str(a) for a in args], cwd=cwd, check=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        tmp = Path(folder)
        dist = tmp / "dist"
        call(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, ROOT, cwd=tmp)
        (wheel,), (sdist,) = list(dist.glob("*.whl")), list(dist.glob("*.tar.gz"))
        names = {n.split("/")[0] for n in zipfile.ZipFile(wheel).namelist()}
        tops = {n for n in names if not n.endswith(".dist-info")}
        assert tops == {"graphopt"}, f"the wheel installs {sorted(tops)}"
        inside = {str(Path(n).parent).replace("/", ".") for n in zipfile.ZipFile(wheel).namelist() if n.endswith((".py", ".json"))}
        assert inside == PACKAGES, f"the wheel holds {sorted(inside)}"
        for archive in (wheel, sdist):
            env = tmp / f"env-{archive.suffix.strip('.')}"
            venv.create(env, with_pip=False)
            python = env / "bin" / "python"
            site = next((env / "lib").glob("python*")) / "site-packages"
            call(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", site,
                 archive, cwd=tmp)
            # torch and the other dependencies come from the environment this runs in, the package itself must not
            host = [p for p in sys.path if p.endswith("site-packages")]
            probe = f"import sys; sys.path += {host!r}\n{PROBE}"
            call(python, "-c", probe, cwd=tmp)
            shutil.rmtree(env)
    print("wheel and sdist are complete, and install no generic top-level name")


if __name__ == "__main__":
    main()
