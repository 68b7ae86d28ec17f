"""Two packages: Outcore's is small and holds no weights, and those of the demo model are the other's."""

from __future__ import annotations

import hashlib
import re
import tomllib
import zlib
from pathlib import Path
from typing import Any

import outcore
from outcore_tools.demo import DEMO_PACKAGE
from outcore_tools.demo import demo_model as opened_demo_model

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "demo-model"
VENDOR = "src/outcore_pages/page/vendor"
MOST_BYTES = 2_000_000
"""Of Outcore's wheel, promised."""


def project(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))


def test_outcores_package_is_small_and_holds_no_weights() -> None:
    files = [f for f in Path(outcore.__file__).parent.rglob("*") if f.is_file() and f.suffix != ".pyc"]
    # As a wheel has them: each compressed by itself.
    assert sum(len(zlib.compress(f.read_bytes())) for f in files) < MOST_BYTES
    assert [f for f in files if f.suffix == ".safetensors"] == []


def test_the_demo_models_package_is_what_outcore_looks_for(demo_model: Path) -> None:
    theirs, ours = project(DEMO), project(ROOT)
    assert theirs["tool"]["setuptools"]["packages"] == [DEMO_PACKAGE]
    assert ours["project"]["optional-dependencies"]["demo"] == [theirs["project"]["name"]]
    patterns = theirs["tool"]["setuptools"]["package-data"][DEMO_PACKAGE]
    inside = {f for pattern in patterns for f in (DEMO / DEMO_PACKAGE).glob(pattern)}
    files = {f for f in demo_model.rglob("*") if f.is_file() and f.parent.name != "__pycache__"}
    assert inside == files - {demo_model / "__init__.py"}
    with opened_demo_model() as folder:
        assert folder == demo_model and (folder / "model.safetensors").is_file()


def test_each_package_carries_its_licences() -> None:
    ours, theirs = project(ROOT)["project"], project(DEMO)["project"]
    # Outcore's own is MIT, the others are of libraries of the server's page.
    assert ours["license"] == "MIT AND Apache-2.0 AND BSD-2-Clause AND BSD-3-Clause"
    assert ours["license-files"] == ["LICENSE", f"{VENDOR}/LICENSE.*"]
    listed = (ROOT / VENDOR / "README.md").read_text(encoding="utf-8")
    libraries = {f.name: f.read_bytes() for f in (ROOT / VENDOR).glob("*.js")}
    assert len(libraries) == len(list((ROOT / VENDOR).glob("LICENSE.*"))) == 3
    assert all(f"| `{n}` |" in listed and hashlib.sha256(d).hexdigest() in listed for n, d in libraries.items())
    assert (theirs["license"], theirs["license-files"]) == ("MIT AND PSF-2.0", ["LICENSE", "LICENSE-PSF.txt"])
    assert (DEMO / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert (DEMO / "LICENSE-PSF.txt").is_file()


def test_what_installs_a_checkout_installs_both() -> None:
    setup = (ROOT / "scripts" / "setup").read_text(encoding="utf-8")
    assert "--editable ./demo-model" in setup and "demo-model/pyproject.toml -nt" in setup
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = re.findall(r"^    pip install .*$", readme, re.MULTILINE)
    assert len(lines) == 3 and all(" ./demo-model " in line for line in lines)
