"""The flags of ``outcore launch``. Light: no MLX."""

from __future__ import annotations

import argparse

from outcore.cli.parser import Flag, flag

LAUNCH: list[str | Flag] = [
    flag(
        "--hosts",
        "Names for ssh, or addresses, with commas between them; the first prints the answer. local is this machine. "
        "Default: those of --hostfile.",
    ),
    flag("--hostfile", 'A file as mlx.launch takes: [{"ssh": "mini.local", "ips": ["10.0.0.2"]}, ...].'),
    flag("--repeat-hosts -n", "Ranks on each host.", 1),
    flag("--python", "Python with Outcore on every host. Default: the path of this one."),
    flag("--cwd", "Folder to run in, on every host. Default: this one, where it is there."),
    flag("--env", "A variable for all ranks. Default: none.", action="append", metavar="NAME=VALUE").but(default=[]),
    flag("--ssh", "Program that reaches other hosts, with flags of its own.", "ssh"),
    flag("words", "What each of them runs.", nargs=argparse.REMAINDER, metavar="-- COMMAND ..."),
    "output-flags",
]
