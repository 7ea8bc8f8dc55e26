"""`MetricsLog`: a training job's values per step, as JSON lines, a progress bar, and in TensorBoard."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


class MetricsLog:
    """Values per optimizer step in `folder/metrics.jsonl` and, where TensorBoard is installed, `folder/tensorboard`.

    Args:
        folder: the run's; made if it is not there.
        step: the step the job goes on from.  What an earlier life of the job wrote for this step and later ones is
            taken out, so that every step stands there once.  0 begins anew.
        total: steps of the job; with it there is a progress bar on stderr.
        enabled: False writes and shows nothing (all processes but the first).
        tensorboard: None uses it where it is installed.

    `steps` counts what this process has written.
    """

    def __init__(
        self, folder: str | Path, step: int = 0, *, total: int | None = None, enabled: bool = True,
        tensorboard: bool | None = None,
    ) -> None:
        self.enabled, self.steps, self._bar, self._board = enabled, 0, None, None
        if not enabled:
            return
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        kept = [line for line in _lines(path) if line["step"] < step]
        part = path.with_suffix(".part")
        part.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(part, path)
        self._file = path.open("a", buffering=1)
        if tensorboard is not False:
            self._board = _board(folder / "tensorboard", step, bool(tensorboard))
        if total is not None:
            self._bar = _bar()
            self._bar.start()
            self._task = self._bar.add_task("", total=total, completed=step, values="")

    def write(self, step: int, **values: float) -> None:
        """One step's values; a line is written whole."""
        if not self.enabled:
            return
        self.steps += 1
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)
        if self._bar is not None:
            shown = "  ".join(f"{k} {v:.4g}" for k, v in list(values.items())[:3])
            self._bar.update(self._task, completed=step + 1, values=shown)

    def close(self) -> None:
        """Write out what is buffered."""
        if not self.enabled:
            return
        self._file.close()
        if self._board is not None:
            self._board.close()
        if self._bar is not None:
            self._bar.stop()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file; one that a kill cut short is left out."""
    found = []
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(text))
        except ValueError:
            log.warning("%s has a line that was cut short: %.40s", path, text)
    return found


def _board(folder: Path, step: int, needed: bool) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        if needed:
            raise
        return None
    return SummaryWriter(str(folder), purge_step=step)


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                    TextColumn("{task.fields[values]}"), console=Console(stderr=True))
