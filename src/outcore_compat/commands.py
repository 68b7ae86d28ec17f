"""The flag that this package adds to the core's commands, as ``outcore.cli.commands`` finds it. Imports no MLX."""

from __future__ import annotations

from collections.abc import Mapping

from outcore.cli.commands import Command

COMMANDS: Mapping[str, Command] = {}
FLAGS = dict.fromkeys(("generate", "chat", "serve"), "outcore_compat.modelfile.preset:add_flag")
