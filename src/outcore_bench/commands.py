"""The commands that this package brings, as ``outcore.cli.commands`` finds them. Light: no MLX."""

from __future__ import annotations

from outcore.cli.commands import HUB, Command

from .words import WAYS


def _command(name: str, about: str, example: str, module: str = "") -> tuple[str, Command]:
    run, flags = f"outcore_bench.{module or name}:run", f"outcore_bench.flags:{name.upper()}"
    return name, Command(about, run, flags, example, "measure")


COMMANDS = dict([
    _command(
        "bench",
        "Speed and memory at each budget, beside mlx-lm and the plain way. Each row is measured in a process of its "
        f"own: {'; '.join(f'{name}, {what}' for name, what in WAYS.items())}.",
        f"{HUB} --memory 2GB,50% --output results.json",
    ),
    _command(
        "matrix",
        "Speed at every combination of budget, way of reading, slots and threads, and which is best. Each is measured "
        "in a process of its own.",
        f"{HUB} --memory 2GB,4GB --slots 2,3",
    ),
    _command(
        "perplexity",
        "How well a model foretells a text or a data set, by mlx-lm's definition.",
        f"{HUB} --memory 4GB --data-path text.txt",
    ),
    _command(
        "report",
        "One page, and Markdown, from result files of outcore bench, matrix and perplexity. What was not measured is "
        "left out.",
        "results.json --output page",
        "report.page",
    ),
])  # fmt: skip
FLAGS = {"plan": "outcore_bench.flags:plan"}
"""``outcore plan --device``, for a published device instead of this machine."""
