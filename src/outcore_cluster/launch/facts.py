"""Whether all hosts have the same model: ``python -m outcore_cluster.launch.facts MODEL [REVISION]`` on each.

Digests are over small files (configuration, tokenizer, templates). Weights are compared when ranks meet (``folders``).
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outcore.errors import CheckpointError, MissingFileError, OutcoreError
from outcore.machine.small_files import TOKENIZER_BYTES, read_small
from outcore.text import one_line

SMALL = ("*.json", "*.jinja", "*.txt", "*.model", "*.py")
"""Files beside the weights that decide what a prompt's tokens are."""
ABSENT = "no such folder"
ORIGINAL, PACKED = "original", "packed"
"""What has a configuration as its authors wrote it and weights in their files, or both as ``pack`` wrote them."""


def model_facts(name: str, revision: str | None) -> dict[str, Any]:
    """What this host has of a model: ``digests``; or ``absent``, of one that the Hub has; or ``error``."""
    try:
        folder = Path(name).expanduser()
        if folder.is_dir():
            return dict(digests(folder))
        found = _cached(name, revision)
        try:
            return {"absent": True} if found is None else dict(digests(found))
        except MissingFileError:
            return {"absent": True}  # each rank fetches what it needs
    except (OutcoreError, OSError, ValueError) as e:
        return {"error": one_line(e)}


def digests(folder: Path) -> dict[str, str]:
    """16 hex digits over files beside a model's weights, as ``digest``, and over its configuration, under the name of
    what it is: ``original`` or ``packed``.

    Raises:
        OutcoreError: it is no model's, or not whole. OSError: a file cannot be read.
    """
    from outcore.checkpoint.checkpoint import open_checkpoint
    from outcore.checkpoint.manifest import is_packed

    if not (packed := is_packed(folder)):
        open_checkpoint(folder)
    paths = sorted({path for pattern in SMALL for path in folder.glob(pattern) if path.is_file()})
    # ``pack`` notes in its manifest when and from what it was made.
    paths = [path for path in paths if not path.name.startswith("manifest")]
    own = [path for path in paths if path.name == "config.json" or path.name.endswith(".safetensors.index.json")]
    beside = [path for path in paths if path not in own]
    return {"digest": _over(beside), PACKED if packed else ORIGINAL: _over(own)}


def _over(paths: Sequence[Path]) -> str:
    found = hashlib.sha256()
    for path in paths:
        found.update(f"{path.name}\n".encode() + hashlib.sha256(read_small(path, TOKENIZER_BYTES)).digest())
    return found.hexdigest()[:16]


def _cached(name: str, revision: str | None) -> Path | None:
    """The folder of the Hub's cache that a name stands for, if it is there. Nothing is fetched.

    Raises:
        CheckpointError: it can be no name of the Hub's.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:
        raise CheckpointError(ABSENT) from None
    return Path(found).parent if isinstance(found, str) else None


def main(words: Sequence[str]) -> None:
    """Print a line of JSON."""
    print(json.dumps(model_facts(words[0], words[1] if len(words) > 1 else None)))


if __name__ == "__main__":
    main(sys.argv[1:])
