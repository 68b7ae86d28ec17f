"""The flags of ``outcore matrix``."""

from __future__ import annotations

from outcore.cli.flag_table import FLAGS, command_parser, flag, grouped
from outcore.cli.parser import ArgumentParser

from ..words import BUDGETS, IO
from .bench import runs


def setup_arg_parser() -> ArgumentParser:
    """The command's flags."""
    budgets = f"Budgets, such as 2GB,4GB. Default: {BUDGETS}, from the smallest that works to everything resident."
    ways = f"Ways to read. Default: {','.join(IO)}, or what the file system allows."
    axes = grouped(
        "axes (lists are separated by commas)",
        flag("--memory", budgets, metavar="SIZES"),
        flag("--io", ways, metavar="LIST"),
        flag("--slots", "Layers in the ring.", "2,3,4", metavar="LIST"),
        flag("--threads", "Reads in flight.", "1,4,8", metavar="LIST"),
    )
    return command_parser(
        "outcore matrix",
        "Measure a model at every combination of budget, way of reading, slots and threads, each in a process of its "
        "own, and say which is best and where speed falls off. Cut off, it goes on where it stopped.",
        "outcore matrix mlx-community/Qwen3-8B-4bit --memory 2GB,4GB --slots 2,3",
        "model revision",
        *axes,
        *runs(8),
        FLAGS["output"].but(
            metavar="DIR",
            help="Folder for one JSON file a run, matrix.json and the heat map; runs that are there are not measured "
            "again. Default: ./MODEL-matrix.",
        ),
        FLAGS["force"].but(help="Throw away the runs that are there, and measure all again."),
    )
