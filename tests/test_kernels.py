"""Where MLX keeps the CUDA kernels that it compiles."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import mlx.core as mx
import pytest

from outcore.machine import kernels
from outcore.machine.kernels import FOLDER, keep_kernels


@pytest.fixture
def cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A device whose kernels are compiled as CUDA's are; where they are kept."""
    monkeypatch.setattr(kernels, "on_cuda", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda *_: {"architecture": "sm_90"})
    monkeypatch.setenv("OUTCORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(FOLDER, raising=False)
    found = keep_kernels()
    assert found is not None and found.is_relative_to(tmp_path / "cache" / "kernels")
    assert os.environ[FOLDER] == str(found)
    return found


def test_half_a_kernel_goes_and_a_whole_one_stays(cuda: Path) -> None:
    old = time.time() - 1000
    for name, source, when in (
        ("half", None, old), ("whole", "source", old), ("under way", None, time.time()), ("full disk", "", old),
    ):  # fmt: skip
        (cuda / f"{name}.ptx").write_text("x")
        if source is not None:
            (cuda / f"{name}.cu").write_text(source)
        os.utime(cuda / f"{name}.ptx", (when, when))
    keep_kernels()
    assert sorted(f.name for f in cuda.glob("*.ptx")) == ["under way.ptx", "whole.ptx"]
    assert {stat.S_IMODE(f.stat().st_mode) for f in (cuda, cuda.parent)} == {0o700}


def test_a_folder_that_was_set_for_mlx_before_is_kept(
    tmp_path: Path, cuda: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "mine.ptx").write_text("x")
    os.utime(theirs / "mine.ptx", (0, 0))
    monkeypatch.setenv(FOLDER, str(theirs))
    assert keep_kernels() == theirs and (theirs / "mine.ptx").exists()
    # Empty: none are kept, and the current folder is none of ours.
    monkeypatch.setenv(FOLDER, "")
    monkeypatch.chdir(theirs)
    assert keep_kernels() is None and (theirs / "mine.ptx").exists()


def test_other_devices_keep_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    monkeypatch.setattr(kernels, "on_cuda", lambda: False)
    assert keep_kernels() is None and FOLDER not in os.environ
