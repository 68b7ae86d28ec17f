"""The command ``launch``, as ``outcore.cli.commands`` finds it. Imports no MLX."""

from __future__ import annotations

import argparse

from outcore.cli.commands import HUB, Command, Flag, flag

COMMANDS = {
    "launch": Command(
        "Run a command on several machines, each with a share of the model's layers. Checks first that all hosts can "
        "be reached and have the same versions; the ranks then check that they have the same model. Exits with 0 if "
        "all ranks did, 1 if one failed, 130 after Ctrl-C. No rank keeps running afterwards.",
        "outcore_cluster.launch.launch:run",
        "outcore_cluster.commands:LAUNCH",
        f"--hosts local,mini.local -- generate {HUB} --memory 16GB",
        "several machines",
        launcher=True,
    )
}
RANK = "outcore_cluster.launch.as_rank"

LAUNCH: list[str | Flag] = [
    flag(
        "--hosts",
        "Names for ssh, or addresses, separated by commas; the first host prints the answer. local is this machine. "
        "Default: the hosts of --hostfile.",
    ),
    flag("--hostfile", 'A file as for mlx.launch: [{"ssh": "mini.local", "ips": ["10.0.0.2"]}, ...].'),
    flag("--repeat-hosts -n", "Ranks on each host.", 1),
    flag("--python", "Path of Python with Outcore on every host. Default: the path here."),
    flag("--cwd", "Folder to run in, on every host. Default: this folder, on hosts that have it."),
    flag("--env", "A variable for all ranks. Default: none.", action="append", metavar="NAME=VALUE").but(default=[]),
    flag("--ssh", "Program that reaches other hosts, with its flags.", "ssh"),
    flag("words", "The command that each rank runs.", nargs=argparse.REMAINDER, metavar="-- COMMAND ..."),
    "output-flags",
]
