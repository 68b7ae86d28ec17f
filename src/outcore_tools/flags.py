"""The flags of this package's commands. Imports no MLX."""

from __future__ import annotations

from outcore.cli.core_flags import PLANNED
from outcore.cli.flags import FLAGS
from outcore.cli.parser import Flag, flag, switch

SHELLS, ACTIONS = ("bash", "zsh", "tcsh"), ("ls", "rm", "clear")

INFO: list[str | Flag] = ["model-flags", *PLANNED, "engine-flags output-flags"]

LIST: list[str | Flag] = [
    flag("--cache-dir", "Another cache of the Hub. Default: the Hub's own.", metavar="DIR"),
    FLAGS["memory"].but(group="", help="The budget to compare with. Default: what would be used."),
    FLAGS["context"].but(group=""),
    "output-flags",
]

DEMO: list[str | Flag] = [
    FLAGS["memory"].but(group="", help="The streamed run's budget.", default="15MB"),
    FLAGS["prompt"].but(default="def read_lines(path):\n", help="The prompt. Default: the head of a function."),
    FLAGS["max-tokens"].but(default=64, help="Tokens to generate."),
    "output-flags",
]

DOCTOR: list[str | Flag] = [
    "model_named",
    FLAGS["model"].but(help="A model whose files and plan are looked at, too. Default: none."),
    "revision output-flags",
]

MONITOR: list[str | Flag] = [switch("--once", "Show it once, after a second, and end."), "output-flags"]

CACHE: list[str | Flag] = [
    flag("action", "Show what there is, largest first; remove some; remove all.", metavar="ls | rm | clear"),
    flag("names", "What rm removes: as ls shows it, or a beginning that only one has.", (), nargs="*", metavar="NAME"),
    FLAGS["force"].but("--yes", "-y", help="Do not ask before all of it is removed."),
    "output-flags",
]

COMPLETION: list[str | Flag] = [flag("shell", f"{', '.join(SHELLS)}.", metavar="SHELL")]
