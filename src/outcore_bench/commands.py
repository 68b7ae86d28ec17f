"""The commands of this package (see ``outcore.cli.commands``). Imports no MLX."""

from __future__ import annotations

from outcore.cli.commands import HUB, Command

from .words import WAYS


def _command(name: str, about: str, example: str, module: str = "") -> tuple[str, Command]:
    run, flags = f"outcore_bench.{module or name}:run", f"outcore_bench.flags:{name.upper()}"
    return name, Command(about, run, flags, example, "measure")


COMMANDS = dict([
    _command(
        "bench",
        "Measure speed and memory at each budget, compared with mlx-lm and naive streaming. Each row runs in a process "
        f"of its own: {'; '.join(f'{name}, {what}' for name, what in WAYS.items())}.",
        f"{HUB} --memory 2GB,50% --output results.json",
    ),
    _command(
        "matrix",
        "Measure every combination of budget, --io, slots and threads, and find the best. Each runs in a process of "
        "its own.",
        f"{HUB} --memory 2GB,4GB --slots 2,3",
    ),
    _command(
        "perplexity",
        "Compute a model's perplexity on a text or a data set, as mlx-lm does.",
        f"{HUB} --memory 4GB --data-path text.txt",
    ),
    _command(
        "report",
        "Write a web page and Markdown from results of outcore bench, matrix and perplexity. What was not measured is "
        "left out.",
        "results.json --output page",
        "report.page",
    ),
])  # fmt: skip
FLAGS = {"plan": "outcore_bench.flags:plan"}
