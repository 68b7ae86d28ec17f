"""dev/house.py counts what it says."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

CODE = '''
class A:
    x: int

    def __init__(self, y):
        """Two
        lines."""
        self.y = y
        if y:
            self.z = lambda: 0

    def other(self):
        self.late = 1
'''


@pytest.fixture
def house() -> Any:
    spec = importlib.util.spec_from_file_location("house", Path(__file__).parents[1] / "dev" / "house.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_statements_lines_and_fields_of_a_class(house: Any) -> None:
    tree = ast.parse(CODE)
    found = next(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef))
    made = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))
    assert house.statements_of(tree) == 9
    assert house.fields_of(found) == {"x", "y", "z"} and house.methods_of(found) == 2
    assert house.length_of(made) == 4


def test_floors_are_the_longest_chain_and_a_cycle_is_one(
    house: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "__init__.py": "", "top/a.py": "from ..one import b", "one/b.py": "from ..two.c import x",
        "two/c.py": "import outcore.one.b\nfrom .. import low", "low.py": "def f():\n    from .top import a",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / "outcore" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "outcore" / name).write_text(text)
    monkeypatch.setattr(house, "SRC", tmp_path)
    found = house.floors()
    assert found == {"is": 3, "chain": ["top", "one=two", "low"], "cycles": [["one", "two"]]}


def test_calls_are_counted_in_files_of_src_alone(house: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "counted.py").write_text("class A:\n    pass\ndef f(n):\n    return f(n - 1) if n else len('x')\n")
    monkeypatch.setattr(house, "SRC", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with house.Counted() as counted:
        import counted as module  # type: ignore[import-not-found]

        module.f(3)
    del sys.modules["counted"]
    told = counted.told()
    assert (told["calls"], told["functions"], told["files"]) == (4, 1, 1)
