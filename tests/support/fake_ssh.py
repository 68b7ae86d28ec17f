"""Hosts that are this one, and what takes the place of ssh to reach them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

RUNS = 'for last; do :; done\nexec sh -c "$last"'
"""What runs the command that ssh would run there."""


def behind(folder: Path, names: Sequence[str], script: str = RUNS) -> list[str]:
    """Flags of ``outcore launch`` for hosts of these names, reached by a shell script; files go into ``folder``."""
    hosts, ssh = folder / "hosts.json", folder / "ssh"
    hosts.write_text(json.dumps([{"ssh": name, "ips": ["127.0.0.1"]} for name in names]))
    ssh.write_text(f"#!/bin/sh\n{script}\n")
    ssh.chmod(0o700)
    return ["--hostfile", str(hosts), "--ssh", str(ssh)]
