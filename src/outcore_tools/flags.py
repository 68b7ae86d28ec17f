"""The flags of this package's commands. Imports no MLX."""

from __future__ import annotations

from outcore.cli.core_flags import PLANNED
from outcore.cli.flags import FLAGS
from outcore.cli.parser import Flag, flag, switch

SHELLS, ACTIONS = ("bash", "zsh", "tcsh"), ("ls", "rm", "clear")

INFO: list[str | Flag] = ["model-flags", *PLANNED, "engine-flags output-flags"]

LIST: list[str | Flag] = [
    flag("--cache-dir", "Folder of the Hub's cache. Default: the Hub's own.", metavar="DIR"),
    FLAGS["memory"].but(group="", help="Budget to compare with. Default: the budget that commands use by default."),
    FLAGS["context"].but(group=""),
    "output-flags",
]

DEMO: list[str | Flag] = [
    FLAGS["memory"].but(group="", help="Budget of the streamed run.", default="15MB"),
    FLAGS["prompt"].but(default="def read_lines(path):\n", help="The prompt. Default: the first line of a function."),
    FLAGS["max-tokens"].but(default=64, help="Tokens to generate."),
    "output-flags",
]

DOCTOR: list[str | Flag] = [
    "model_named",
    FLAGS["model"].but(help="Check this model's files and plan as well. Default: none."),
    "revision output-flags",
]

MONITOR: list[str | Flag] = [switch("--once", "Print the state once, after a second, and exit."), "output-flags"]

CACHE: list[str | Flag] = [
    flag("action", "ls lists entries, largest first; rm removes some; clear removes all.", metavar="ls | rm | clear"),
    flag("names", "Entries to remove, by name or by the beginning of a name.", (), nargs="*", metavar="NAME"),
    FLAGS["force"].but("--yes", "-y", help="Do not ask before clearing."),
    "output-flags",
]

COMPLETION: list[str | Flag] = [flag("shell", f"The shell: {', '.join(SHELLS)}.", metavar="SHELL")]
