"""The flags of ``outcore completion``."""

from __future__ import annotations

from ..parser import ArgumentParser

SHELLS = ("bash", "zsh", "tcsh")


def setup_arg_parser() -> ArgumentParser:
    """The command's flags."""
    parser = ArgumentParser(
        prog="outcore completion",
        example="outcore completion bash > ~/.local/share/bash-completion/completions/outcore",
        description="Print what lets a shell complete Outcore's commands and flags. For zsh, save it as _outcore in a "
        "folder of $fpath.",
    )
    parser.add_argument("shell", metavar="SHELL", help=f"{', '.join(SHELLS)}.")
    return parser
