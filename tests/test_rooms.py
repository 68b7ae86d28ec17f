"""The rooms of the house: imports go downwards, and scripts/check notices one that does not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import outcore

ROOT = Path(__file__).parents[1]

PLANTED = {
    "monitoring/publisher.py": "from ..decode import generate",
    "disk/reader.py": "from ..decode import loader",
    "plan/plan.py": "def late() -> None:\n    import mlx.core",
    "machine/memory.py": "import mlx_lm.utils",
    "engine/executor.py": "from . import extensions",
    "engine/session.py": "def later() -> None:\n    from ..decode.speculative import drafting",
}


def test_a_planted_import_that_goes_the_wrong_way_is_refused(tmp_path: Path) -> None:
    package = tmp_path / "src" / "outcore"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(Path(outcore.__file__).parents[1], tmp_path / "src", ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "dev").mkdir()
    shutil.copy(ROOT / "dev" / "contracts.py", tmp_path / "dev")
    for file, line in PLANTED.items():
        with (package / file).open("a", encoding="utf-8") as code:
            code.write(f"\n\n{line}\n")
    done = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "src"), "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "4 broken" in done.stdout
    for broken in (
        "outcore.monitoring.publisher -> outcore.decode.generate",
        "outcore.disk.reader -> outcore.decode.loader",
        "outcore.plan.plan -> mlx",
        "outcore.machine.memory -> mlx_lm",
        "outcore.engine.executor -> outcore.engine.extensions",
        "outcore.engine.session -> outcore.decode.speculative.drafting",
    ):
        assert broken in done.stdout, broken
    assert "lint-imports" in (ROOT / "scripts" / "check").read_text(encoding="utf-8")


def test_the_root_holds_the_public_face_and_nothing_else() -> None:
    found = {path.name for path in Path(outcore.__file__).parent.glob("*.py")}
    assert {name.removesuffix(".py") for name in found} == {
        "__init__", "__main__", "checks", "errors", "options", "packages", "sizes", "text", "version",
    }  # fmt: skip
