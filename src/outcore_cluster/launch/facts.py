"""Whether all hosts have the same model: ``python -m outcore_cluster.launch.facts MODEL [REVISION]`` on each.

Digests leave out times, which copies of a folder do not share. They are over the whole of small files (configuration,
tokenizer, templates), over headers, and over a block of each tensor.
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
        if not folder.is_dir():
            if (found := _cached(name, revision)) is None:
                return {"absent": True}
            folder = found
            if not _whole(folder):
                return {"absent": True}  # each rank fetches what it needs
        return dict(digests(folder))
    except (OutcoreError, OSError, ValueError) as e:
        return {"error": one_line(e)}


def digests(folder: Path) -> dict[str, str]:
    """16 hex digits over files beside a model's weights, as ``digest``, and over its configuration and weights, under
    the name of what it is: ``original`` or ``packed``.

    Raises:
        OutcoreError: it is no model's, or not whole. OSError: a file cannot be read.
    """
    from outcore.checkpoint.manifest import is_packed

    paths = sorted({path for pattern in SMALL for path in folder.glob(pattern) if path.is_file()})
    # ``pack`` notes in its manifest when and from what it was made.
    paths = [path for path in paths if not path.name.startswith("manifest")]
    own = [path for path in paths if path.name == "config.json" or path.name.endswith(".safetensors.index.json")]
    packed = is_packed(folder)
    return {
        "digest": _over([path for path in paths if path not in own], ""),
        PACKED if packed else ORIGINAL: _over(own, "" if packed else _weights(folder)),
    }


def _over(paths: Sequence[Path], more: str) -> str:
    found = hashlib.sha256()
    for path in paths:
        found.update(f"{path.name}\n".encode() + hashlib.sha256(read_small(path, TOKENIZER_BYTES)).digest())
    found.update(more.encode())
    return found.hexdigest()[:16]


def _weights(folder: Path) -> str:
    from outcore.checkpoint.checkpoint import open_checkpoint
    from outcore.checkpoint.identity import identity

    checkpoint = open_checkpoint(folder)
    tensors = {file: [t for t in checkpoint.tensors.values() if t.file == file] for file in checkpoint.files}
    stamps = {
        file: repr((file.name, file.stat().st_size, sorted((t.name, t.dtype, t.shape, t.offset) for t in found)))
        for file, found in tensors.items()
    }
    places = {file: [(t.offset, t.nbytes) for t in found] for file, found in tensors.items()}
    return identity(b"", [(file, stamps[file].encode(), places[file]) for file in checkpoint.files])


def _whole(folder: Path) -> bool:
    """Whether the Hub's cache has all shards."""
    from outcore.checkpoint.checkpoint import open_checkpoint

    try:
        open_checkpoint(folder)
    except MissingFileError:
        return False
    return True


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
