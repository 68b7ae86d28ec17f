"""The flags of ``outcore launch``, and those of ``outcore pack`` that are about ranks. Light: no MLX."""

from __future__ import annotations

import argparse

from outcore.cli.arguments import add_output_arguments
from outcore.cli.parser import ArgumentParser


def setup_arg_parser() -> ArgumentParser:
    """The command's flags."""
    parser = ArgumentParser(
        prog="outcore launch",
        example="outcore launch --hosts local,mini.local -- generate mlx-community/Qwen3-8B-4bit --memory 16GB",
        description="Run a command on several machines, each with a share of the model's layers. Looks first whether "
        "they can be reached and have the same versions and the same model. Ends with 0 if all of them did, with 1 if "
        "one failed, and 130 after Ctrl-C; whatever happens, nothing keeps running.",
    )
    parser.hint = "; the command's own flags come behind its name"
    parser.add_argument(
        "--hosts",
        help="Names for ssh, or addresses, with commas between them; the first prints the answer. local is this "
        "machine. Default: those of --hostfile.",
    )
    parser.add_argument(
        "--hostfile",
        help='A file as mlx.launch takes: [{"ssh": "mini.local", "ips": ["10.0.0.2"]}, ...]; a host may have a "model" '
        "there, too, as with --model-of. Default: none.",
    )
    parser.add_argument("--repeat-hosts", "-n", type=int, default=1, help="Ranks on each host. Default: 1.")
    parser.add_argument(
        "--model-of",
        action="append",
        default=[],
        metavar="HOST=PATH",
        help="Where a host has the model, if not where the command says; again for others. Default: there.",
    )
    parser.add_argument("--python", help="Python with Outcore on every host. Default: the path of this one.")
    parser.add_argument("--cwd", help="Folder to run in, on every host. Default: this one, where it is there.")
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="A variable for all ranks. Default: none."
    )
    parser.add_argument(
        "--ssh", default="ssh", help="Program that reaches other hosts, with flags of its own. Default: ssh."
    )
    parser.add_argument("--no-check", action="store_true", help="Do not compare versions and models first.")
    # For tests: the words are a program of their own.
    parser.add_argument("--program", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="What each of them runs.")
    add_output_arguments(parser)
    return parser


def add_pack_flags(parser: ArgumentParser) -> None:
    """Add ``--ranks`` and ``--blocks`` to ``outcore pack``."""
    parser.add_argument(
        "--ranks",
        dest="ranks_wanted",
        metavar="N[:SHARES]",
        help="Write a folder for each of so many machines that will share the model's layers (outcore launch), rank-0, "
        "rank-1 and so on in --output: with its own layers and what all need; the head is the first one's. SHARES: how "
        "much of the layers each has, such as 2:1,3. Default: one copy of all of it.",
    )
    parser.add_argument(
        "--blocks",
        action="store_true",
        help="With --ranks: each machine gets layers that follow each other, for machines whose memories hold all of "
        "them together. Else they alternate, so that all disks read at the same time.",
    )
    parser.run = "outcore_cluster.launch.pack:run"
