"""The flags of ``outcore monitor``."""

from __future__ import annotations

from ..arguments import add_output_arguments
from ..parser import ArgumentParser


def setup_arg_parser() -> ArgumentParser:
    """The command's flags."""
    parser = ArgumentParser(
        prog="outcore monitor",
        example="outcore monitor --once",
        description="Show what your running Outcore processes do: layers, memory, the disk, tokens. Keys: left, right, "
        "tab switch the process, k ends it, q leaves. With --json a snapshot a line, four times a second.",
    )
    parser.add_argument("--pid", type=int, metavar="N", help="Only the process of this number. Default: all.")
    parser.add_argument("--once", action="store_true", help="Show it once, after a second, and end.")
    add_output_arguments(parser)
    return parser
