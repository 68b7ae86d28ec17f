"""What this package adds to ``outcore plan``."""

from __future__ import annotations

from pathlib import Path

from outcore.cli.parser import ArgumentParser


def add_flags(parser: ArgumentParser) -> None:
    """Add ``--device`` and ``--plot``."""
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="Predict for a published device instead of this machine; without a model, how well the published system's "
        "own speeds are explained there. Default: none.",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="Write speed against memory as PNG or SVG. Default: nowhere."
    )
    parser.run = "outcore_bench.commands.plan:run"
