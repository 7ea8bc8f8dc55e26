from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys

import pytest

from graphopt.codegen import store
from graphopt.errors import CodegenError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAPHOPT_CACHE_DIR", str(tmp_path))
    return tmp_path / "kernels"


def test_written_once_and_loaded(folder) -> None:
    path = store.write("k", "VALUE = 3\n")
    before = path.stat().st_mtime_ns
    assert store.write("k", "VALUE = 3\n") == path
    assert path.stat().st_mtime_ns == before
    assert store.load("k", "VALUE = 3\n").VALUE == 3
    assert store.write("k", "VALUE = 4\n") != path


@pytest.mark.parametrize("damage", [b"", b"VALUE = 9\n", b"\x00\xff garbage"])
def test_a_corrupt_file_is_rebuilt(folder, damage: bytes) -> None:
    path = store.write("k", "VALUE = 5\n")
    path.write_bytes(damage)
    assert store.write("k", "VALUE = 5\n").read_text() == "VALUE = 5\n"
    assert store.load("k", "VALUE = 5\n").VALUE == 5


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch, caplog) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv("GRAPHOPT_CACHE_DIR", str(blocked))
    assert store.load("k", "VALUE = 6\n").VALUE == 6
    assert "cannot be used" in caplog.text
    assert blocked.read_text() == "in the way"


def test_read_only_folder(folder, monkeypatch) -> None:
    if os.geteuid() == 0:
        real = os.replace
        monkeypatch.setattr(store.os, "replace", lambda a, b: (_ for _ in ()).throw(PermissionError(b))
                            if str(folder) in str(b) else real(a, b))
    else:
        folder.mkdir(parents=True)
        folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert store.load("k", "VALUE = 7\n").VALUE == 7


class Full:
    """Makes a folder's disk full: half of a file fits, then writing fails."""

    def __init__(self, monkeypatch, folder: str) -> None:
        real = os.fdopen

        def fdopen(handle, *args):
            name = os.readlink(f"/proc/self/fd/{handle}")
            out = real(handle, *args)
            if folder not in name:
                return out

            class Stuck:
                def __enter__(self):
                    return self

                def __exit__(self, *rest):
                    out.close()

                def write(self, data):
                    out.write(data[:len(data) // 2])
                    out.flush()
                    raise OSError(errno.ENOSPC, "No space left on device", name)

            return Stuck()

        monkeypatch.setattr(store.os, "fdopen", fdopen)


def test_a_full_disk_leaves_nothing_half_written(folder, monkeypatch, caplog) -> None:
    with monkeypatch.context() as m:
        Full(m, str(folder))
        assert store.load("k", "VALUE = 9\n").VALUE == 9
    assert "No space left" in caplog.text
    assert list(folder.iterdir()) == []
    assert store.write("k", "VALUE = 9\n").parent == folder  # room again


def test_no_disk_at_all(folder, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(store, "temporary_folder", lambda: tmp_path / "temporary")
    Full(monkeypatch, str(tmp_path))
    with pytest.raises(CodegenError, match="No space left.*\n.*GRAPHOPT_CACHE_DIR"):
        store.write("k", "VALUE = 10\n")
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_eight_processes_at_once(folder) -> None:
    code = "from graphopt.codegen import store; assert store.load('k', 'VALUE = 8\\n' * 2000).VALUE == 8"
    running = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE) for _ in range(8)]
    assert [p.communicate()[1].decode()[-300:] + str(p.returncode) for p in running] == ["0"] * 8
    assert len(list(folder.iterdir())) == 1
