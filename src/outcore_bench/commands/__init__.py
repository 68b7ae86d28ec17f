"""The commands that this package brings, as ``outcore.cli.commands`` finds them. Light: no MLX."""

from __future__ import annotations

from outcore.cli.commands import Command


def _command(name: str, help: str) -> Command:
    return Command(help, f"outcore_bench.flags:{name}", f"outcore_bench.commands.{name}:run")


COMMANDS = {
    "bench": _command("bench", "speed and memory at each budget, beside mlx-lm and the plain way"),
    "matrix": _command("matrix", "speed over budgets, ways of reading, slots and threads, and the best point"),
    "perplexity": _command("perplexity", "how well a model foretells a text; mlx-lm's definition"),
    "report": _command("report", "one page, and Markdown, from result files of outcore bench"),
}
FLAGS = {"plan": "outcore_bench.flags:plan"}
