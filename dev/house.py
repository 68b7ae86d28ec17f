"""The house in numbers: how large the code is, how far its floors go up, and what one token and one load pass through.

    python dev/house.py --model FOLDER [--demo FOLDER] [--json]    # FOLDER: a 28M hybrid of 16 layers, for one token
    python dev/house.py --fast                                     # what needs no model, wheel or process

What each line counts:

    lines, statements  of Python files; statements are the nodes ``ast.stmt``, docstrings among them
    inner core         lines of the modules that pyproject.toml's contract of that name lists
    flags              names of options of all commands' parsers, without -h; places: pairs of a command and a name
    token              calls that ``sys.setprofile`` sees on the main thread in files of src, from asking for the third
                       token until it is there; generators that go on count, as do comprehensions where they are frames,
                       bodies of modules and classes do not. It comes a second after the one before, so it has a look at
                       memory; the token after it has none
    load               the same of a process's first ``outcore.load``, with 4 resident layers and nothing drafted
    floors             rooms (packages of the core, modules beside them, and its root) on the longest chain of imports
                       at the top of modules, those for type checkers too; rooms that import each other are one floor
    function           lines of the longest one, without its docstring and the functions' decorators
    fields, methods    of the class that has the most: annotated ones, and ``self`` attributes of ``__init__``
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SRC, CORE = ROOT / "src", "outcore"
RESIDENT, TOKENS, TIMES = 4, 5, 5
LOOK_S = 1.2
"""Seconds after which a running model looks at memory again."""

PROMPT = [9, 8, 7, 6, 5, 4, 3, 2, 1, 9, 8, 7]

Function = ast.FunctionDef | ast.AsyncFunctionDef


# ---- what stands in files -----------------------------------------------------------------------------------------


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def files_of(*folders: Path) -> list[Path]:
    return sorted(p for folder in folders for p in folder.rglob("*.py"))


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def statements_of(tree: ast.AST) -> int:
    return sum(isinstance(node, ast.stmt) for node in ast.walk(tree))


def length_of(function: Function) -> int:
    """Lines of a function without its docstring."""
    assert function.end_lineno is not None
    length = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None and first.end_lineno is not None:
        length -= first.end_lineno - first.lineno + 1
    return length


def fields_of(found: ast.ClassDef) -> set[str]:
    """Names that a class annotates in its body, and that its ``__init__`` assigns to ``self``."""
    names = {n.target.id for n in found.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    for made in found.body:
        if isinstance(made, ast.FunctionDef) and made.name == "__init__":
            for node in ast.walk(made):
                own = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
                if own and isinstance(node.value, ast.Name) and node.value.id == "self":  # type: ignore[attr-defined]
                    names.add(node.attr)  # type: ignore[attr-defined]
    return names


def methods_of(found: ast.ClassDef) -> int:
    return sum(isinstance(node, Function) for node in found.body)


def named(tree: ast.Module, path: Path, kind: type | Any) -> Iterator[tuple[str, Any]]:
    for node in ast.walk(tree):
        if isinstance(node, kind):
            yield f"{path.relative_to(SRC)}:{node.lineno} {node.name}", node


def largest(of: Iterator[tuple[str, Any]], size: Callable[[Any], int]) -> dict[str, Any]:
    where, node = max(of, key=lambda item: size(item[1]))
    return {"is": size(node), "where": where}


def inner_core() -> list[Path]:
    """The files of the modules that the contract of that name lists."""
    said = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    listed = next(each["modules"] for each in said if each["type"] == "closed")
    return [(SRC / Path(*name.split("."))).with_suffix(".py") for name in listed]


# ---- floors -------------------------------------------------------------------------------------------------------


def room_of(module: str) -> str | None:
    """The room of the core that a dotted name is in: its package, the module where that is beside the packages, or the
    root; None: it is in none."""
    parts = module.split(".")
    if parts[0] != CORE:
        return None
    there = len(parts) > 1 and ((SRC / CORE / parts[1]).is_dir() or (SRC / CORE / f"{parts[1]}.py").exists())
    return parts[1] if there else "__init__"


def imports_of(path: Path) -> set[str]:
    """Dotted names that a module imports at its top, also inside of ``if`` and ``try``."""
    package = [*path.relative_to(SRC).parent.parts]
    names: set[str] = set()
    inner = [node for node in ast.walk(tree_of(path)) if isinstance(node, Function | ast.Lambda)]
    inside = {id(node) for function in inner for node in ast.walk(function)}
    for node in ast.walk(tree_of(path)):
        if id(node) in inside:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            whole = [*base, *(node.module or "").split(".")] if node.module else base
            names |= {".".join([*whole, alias.name]) for alias in node.names}
    return names


def floors() -> dict[str, Any]:
    """The longest chain of rooms, where rooms that import each other are one floor."""
    edges: dict[str, set[str]] = {}
    for path in files_of(SRC / CORE):
        room = room_of(".".join(path.relative_to(SRC).with_suffix("").parts))
        assert room is not None
        edges.setdefault(room, set()).update(r for n in imports_of(path) if (r := room_of(n)) not in (None, room))
    reached = {room: _reached(room, edges) for room in edges}
    rings = {room: frozenset(other for other in reached[room] if room in reached[other]) | {room} for room in edges}
    below = {ring: {rings[b] for room in ring for b in edges[room]} - {ring} for ring in set(rings.values())}

    @cache
    def height(ring: frozenset[str]) -> tuple[int, tuple[str, ...]]:
        least = max((height(b) for b in below[ring]), default=(0, ()))
        return 1 + least[0], ("=".join(sorted(ring)), *least[1])

    count, chain = max(height(ring) for ring in below)
    return {"is": count, "chain": list(chain), "cycles": [sorted(r) for r in below if len(r) > 1]}


def _reached(room: str, edges: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    ahead = [room]
    while ahead:
        for other in edges.get(ahead.pop(), set()) - found:
            found.add(other)
            ahead.append(other)
    return found


# ---- what a command takes -----------------------------------------------------------------------------------------


def flags() -> dict[str, Any]:
    """Names of options, and in how many places they stand, from the parsers of all commands (and theirs in turn).

    Where a command takes ``--set NAME=VALUE`` the names count as flags; the redesign's parser tells them as ``keys`` of
    that action.
    """
    listed = importlib.import_module(f"{CORE}.cli.commands")
    names: Counter[str] = Counter()
    for command in listed.commands():
        found: set[str] = set()
        ahead = [listed.parser_of(command)]
        while ahead:
            for action in ahead.pop()._actions:
                if isinstance(action, argparse._SubParsersAction):
                    ahead += action.choices.values()
                elif action.option_strings and not isinstance(action, argparse._HelpAction):
                    longest = max(action.option_strings, key=len)
                    found.add(longest)
                    found |= {f"--set {key}" for key in getattr(action, "keys", ())}
        names.update(found)
    return {"names": len(names), "places": names.total(), "commands": len(listed.commands()), "all": sorted(names)}


# ---- what runs ----------------------------------------------------------------------------------------------------


class Counted:
    """Calls of functions in files of src on this thread, while it is entered."""

    def __init__(self) -> None:
        self.functions: Counter[tuple[str, int, str]] = Counter()

    def __enter__(self) -> Counted:
        within = str(SRC)

        def see(frame: FrameType, event: str, _: Any) -> None:
            code = frame.f_code
            if event == "call" and code.co_flags & inspect.CO_OPTIMIZED and code.co_filename.startswith(within):
                self.functions[code.co_filename, code.co_firstlineno, code.co_name] += 1

        sys.setprofile(see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def told(self) -> dict[str, Any]:
        of_files: Counter[str] = Counter()
        for (file, _, _), n in self.functions.items():
            of_files[str(Path(file).relative_to(SRC))] += n
        return {
            "calls": self.functions.total(),
            "functions": len(self.functions),
            "files": len(of_files),
            "most": of_files.most_common(8),
        }


def token(model: Path) -> dict[str, Any]:
    """Calls of the third token of a text with 4 resident layers, nothing drafted; and of the one after it."""
    import outcore

    loaded, tokenizer = outcore.load(str(model), resident=RESIDENT, draft="none")[:2]
    told = []
    with loaded.outcore:
        tokens = outcore.stream_generate(loaded, tokenizer, PROMPT, max_tokens=TOKENS)
        for n in range(TOKENS - 1):
            if n == 2:
                time.sleep(LOOK_S)
            with Counted() as counted:
                next(tokens)
            told.append(counted.told())
        tokens.close()
        streams = loaded.outcore.plan.streams
    return told[2] | {"next": told[3], "streams": streams}


def loading(model: Path) -> dict[str, Any]:
    """Calls of a process's first load."""
    import outcore

    with Counted() as counted:
        loaded = outcore.load(str(model), resident=RESIDENT, draft="none")[0]
    loaded.outcore.close()
    return counted.told()


def in_a_process(what: str, *args: str) -> dict[str, Any]:
    """What a function above tells, in a process that knows this src and nobody's cache."""
    with tempfile.TemporaryDirectory(prefix="outcore-house-") as folder:
        own = {"OUTCORE_CACHE": folder, "OUTCORE_CONFIG": os.devnull, "OUTCORE_MONITOR": "off"}
        env = os.environ | own | {"PYTHONPATH": os.pathsep.join([str(SRC), str(ROOT / "demo-model")])}
        command = [sys.executable, __file__, "--measure", what, *args]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{what}: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def seconds() -> dict[str, float]:
    """Medians of some processes, after one that is not counted: of ``import outcore`` within one; of all of ``outcore
    --help``, and of a Python that does nothing."""
    env = os.environ | {"PYTHONPATH": str(SRC), "OUTCORE_MONITOR": "off"}
    timed = f"import time; t = time.perf_counter(); import {CORE}; print(time.perf_counter() - t)"

    def run(*words: str) -> tuple[float, str]:
        began = time.perf_counter()
        done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, check=True)
        return time.perf_counter() - began, done.stdout

    def median(values: list[float]) -> float:
        return round(sorted(values[1:])[len(values) // 2 - 1], 4)

    times = range(TIMES + 1)
    return {
        "import": median([float(run("-c", timed)[1]) for _ in times]),
        "help": median([run("-m", CORE, "--help")[0] for _ in times]),
        "python": median([run("-c", "pass")[0] for _ in times]),
    }


def wheel() -> dict[str, int]:
    """Bytes of the wheel, and without its pages (HTML)."""
    with tempfile.TemporaryDirectory(prefix="outcore-house-") as folder:
        kept = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
        for name in kept.stdout.splitlines():
            if name.startswith("src/") or "/" not in name:
                target = Path(folder) / "tree" / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, target)
        command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, str(Path(folder) / "tree")]
        built = subprocess.run(command, capture_output=True, text=True)
        if built.returncode:
            raise SystemExit(f"the wheel cannot be built: {built.stderr.strip()[-500:]}")
        (made,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(made) as archive:
            pages = sum(i.compress_size for i in archive.infolist() if i.filename.endswith(".html"))
        return {"bytes": made.stat().st_size, "without_pages": made.stat().st_size - pages}


# ---- all of it ----------------------------------------------------------------------------------------------------


def house(args: argparse.Namespace) -> dict[str, Any]:
    core, everything = files_of(SRC / CORE), files_of(SRC)
    beside = files_of(ROOT / "tests", ROOT / "benchmarks", ROOT / "dev")
    functions = [each for p in core for each in named(tree_of(p), p, Function)]
    classes = [each for p in core for each in named(tree_of(p), p, ast.ClassDef)]
    longest_file = max(core, key=lines_of)
    several = [n for n, count in Counter(c.name for _, c in classes).items() if count > 1]
    found = {
        "lines": {"core": sum(map(lines_of, core)), "all": sum(map(lines_of, everything)), "files": len(core)},
        "statements": {
            "core": sum(statements_of(tree_of(p)) for p in core),
            "all": sum(statements_of(tree_of(p)) for p in everything),
        },
        "inner_core": {"lines": sum(map(lines_of, inner_core())), "files": len(inner_core())},
        "tests_benchmarks_dev_lines": sum(map(lines_of, beside)),
        "flags": in_a_process("flags"),
        "floors": floors(),
        "longest_function": largest(iter(functions), length_of),
        "largest_file": {"is": lines_of(longest_file), "where": str(longest_file.relative_to(SRC))},
        "most_fields": largest(iter(classes), lambda c: len(fields_of(c))),
        "most_methods": largest(iter(classes), methods_of),
        "names_of_several_classes": {"is": len(several), "all": sorted(several)},
    }
    if args.fast:
        return found
    found |= {"load": in_a_process("loading", str(args.demo)), "seconds": seconds(), "wheel": wheel()}
    if args.model is not None:
        found["token"] = in_a_process("token", str(args.model))
    return found


def table(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Rows: what, now, where or of what."""
    lines, statements, said = found["lines"], found["statements"], found["flags"]
    rows = [
        ("lines of Python: core, all packages", f"{lines['core']:,}, {lines['all']:,}", f"{lines['files']} files"),
        ("statements (AST): core, all packages", f"{statements['core']:,}, {statements['all']:,}", ""),
        ("tests, benchmarks, dev together", f"{found['tests_benchmarks_dev_lines']:,}", ""),
        ("inner core", f"{found['inner_core']['lines']:,}", f"{found['inner_core']['files']} files"),
        ("flags", f"{said['names']} names in {said['places']} places", f"{said['commands']} commands"),
    ]
    for name, what in (("token", "calls, functions, files of one token"), ("load", "the same of a load")):
        if name in found:
            keys = "calls", "functions", "files"
            counts = ", ".join(f"{found[name][key]:,}" for key in keys)
            where = ", ".join(f"{file} {n:,}" for file, n in found[name]["most"][:2])
            rows.append((what, counts, where))
            if following := found[name].get("next"):
                rows.append(("the same of the next token", ", ".join(f"{following[k]:,}" for k in keys), ""))
    rows.append(("floors", str(found["floors"]["is"]), " > ".join(found["floors"]["chain"])))
    for name, what in (
        ("longest_function", "longest function without its docstring"), ("largest_file", "largest file"),
        ("most_fields", "fields of the largest class"), ("most_methods", "methods of the largest class"),
    ):  # fmt: skip
        rows.append((what, str(found[name]["is"]), found[name]["where"]))
    several = found["names_of_several_classes"]
    rows.append(("names that stand for several classes", str(several["is"]), ", ".join(several["all"][:6]) + " ..."))
    if "wheel" in found:
        rows.append(("wheel, without pages", ", ".join(f"{n / 1000:,.0f} kB" for n in found["wheel"].values()), ""))
        timed = found["seconds"]
        rows.append(
            ("import outcore, outcore --help", f"{timed['import']} s, {timed['help']} s", f"Python {timed['python']} s")
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="The house in numbers.")
    parser.add_argument("--model", type=Path, help="a 28M hybrid of 16 layers: what one token passes through")
    parser.add_argument("--demo", type=Path, default=ROOT / "demo-model" / "outcore_demo_model", help="what is loaded")
    parser.add_argument("--fast", action="store_true", help="no model, no wheel, no times")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        what, *given = args.measure
        made = {"flags": flags, "token": token, "loading": loading}[what]
        print(json.dumps(made(*map(Path, given))))
        return 0
    found = house(args)
    if args.json:
        print(json.dumps(found, indent=1))
        return 0
    rows = table(found)
    widths = [max(len(row[n]) for row in rows) for n in (0, 1)]
    for what, now, where in rows:
        print(f"{what:{widths[0]}}  {now:>{widths[1]}}  {where}".rstrip())
    return 0


if __name__ == "__main__":
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]
    sys.exit(main())
