"""The flags of ``outcore launch``. Light: no MLX."""

from __future__ import annotations

import argparse

from outcore.cli.flags import command_parser
from outcore.cli.parser import ArgumentParser, flag


def setup_arg_parser() -> ArgumentParser:
    """The command's flags; those of mlx.launch among them."""
    parser = command_parser(
        "outcore launch",
        "Run a command on several machines, each with a share of the model's layers. Looks first whether they can be "
        "reached and have the same versions; ranks compare the model when they meet. Ends with 0 if all of them did, "
        "with 1 if one failed, and 130 after Ctrl-C; whatever happens, nothing keeps running.",
        "outcore launch --hosts local,mini.local -- generate mlx-community/Qwen3-8B-4bit --memory 16GB",
        flag(
            "--hosts",
            "Names for ssh, or addresses, with commas between them; the first prints the answer. local is this "
            "machine. Default: those of --hostfile.",
        ),
        flag(
            "--hostfile",
            'A file as mlx.launch takes: [{"ssh": "mini.local", "ips": ["10.0.0.2"]}, ...].',
        ),
        flag("--repeat-hosts -n", "Ranks on each host.", 1),
        flag("--python", "Python with Outcore on every host. Default: the path of this one."),
        flag("--cwd", "Folder to run in, on every host. Default: this one, where it is there."),
        flag("--env", "A variable for all ranks. Default: none.", action="append", metavar="NAME=VALUE").but(
            default=[]
        ),
        flag("--ssh", "Program that reaches other hosts, with flags of its own.", "ssh"),
        flag("words", "What each of them runs.", nargs=argparse.REMAINDER, metavar="-- COMMAND ..."),
    )
    parser.hint = "; the command's own flags come behind its name"
    return parser
