"""Digests by which ranks check that their copies of a model have the same weights, however these are stored.

Some bytes of each parameter are compared, and of packed copies the checksums of whole files.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import xxhash
from mlx.utils import tree_flatten

from outcore.checkpoint.checkpoint import ADAPTER, ADAPTER_CONFIG, TensorInfo, read_header, read_object
from outcore.checkpoint.identity import MOST_BLOCKS, block_of, code_print, identity_of, read_blocks
from outcore.checkpoint.lazy_model import LazyModel
from outcore.checkpoint.manifest import MANIFEST, is_packed, read_manifest
from outcore.errors import UsageError
from outcore.machine.small_files import CONFIG_BYTES, TOKENIZER_BYTES, read_small

from .link_protocol import Link

OWN_CODE, CONFIG, SMALL_FILES = "model_file", "config", "small files"
# Files next to the weights that decide a prompt's tokens; ``pack`` copies them.
SMALL = ("*.json", "*.jinja", "*.txt", "*.model")
APPLIED = "fine_tune_type", "num_layers", "lora_parameters"
DIFFERENCES = {
    OWN_CODE: "other code of the model's own",
    CONFIG: "another config.json",
    SMALL_FILES: "another tokenizer, or template,",
    ADAPTER_CONFIG: f"another {ADAPTER_CONFIG}",
}


def weight_prints(lazy: LazyModel) -> dict[str, str]:
    """Returns digests by name. Two copies of the same weights have equal digests under all names that both have.

    Digests cover: a block of each parameter that lies on disk as it is used (of at most ``MOST_BLOCKS`` of them), and
    of an original's other tensors and an adapter's; the files of a packed copy; the paths of all parameters; how an
    adapter is applied; the model's own code, configuration, tokenizer and templates.

    Raises:
        OSError: a file cannot be read. StoreError, CheckpointError: the manifest or the adapter cannot be.
    """
    folder, origins = lazy.checkpoint.folder, lazy.origins
    paths = sorted(path for path, _ in tree_flatten(lazy.model.parameters()))
    # All copies have these paths, so each selects the same ones.
    tensors = {path: origins[path] for path in _some(paths) if path in origins and path not in lazy.decoders}
    found = {
        "parameters": _digest("\n".join(paths).encode()),
        CONFIG: _digest(json.dumps(lazy.config, sort_keys=True, default=str).encode()),
        SMALL_FILES: _digest(*_small_files(folder)),
        OWN_CODE: code_print(folder, lazy.config).decode(),
    }
    if is_packed(folder):
        manifest = read_manifest(folder / MANIFEST)
        found |= {f"{manifest.coding}/{name}": record.checksum for name, record in manifest.files.items()}
    else:
        # Tensors of an original that are converted when they are loaded.
        used, named = {info.name for info in origins.values()}, lazy.checkpoint.tensors
        tensors |= {f"original/{name}": named[name] for name in _some(sorted(named)) if name not in used}
    if (adapter := lazy.arguments.get("adapter_path")) is not None:
        path = Path(adapter) / ADAPTER
        tensors |= {f"adapter/{name}": info for name, info in read_header(path).items()}
        _, config = read_object(path.with_name(ADAPTER_CONFIG), CONFIG_BYTES)
        # What mlx-lm reads (``load_adapters``); the rest describes the training.
        found[ADAPTER_CONFIG] = json.dumps([config.get(name) for name in APPLIED], sort_keys=True)
    return found | _of_tensors(tensors)


def _of_tensors(tensors: dict[str, TensorInfo]) -> dict[str, str]:
    """Returns digests over each tensor's shape and one block, which do not depend on its place in a file."""
    by_file: dict[Path, list[tuple[str, TensorInfo]]] = defaultdict(list)
    for name, info in sorted(tensors.items(), key=lambda item: item[1].offset):
        by_file[info.file].append((name, info))
    found = {}
    for file, its in by_file.items():
        places = [block_of(0, info.nbytes) for _, info in its]
        blocks = [(info.offset + at, nbytes) for (_, info), (at, nbytes) in zip(its, places, strict=True)]
        for (name, info), data in zip(its, read_blocks(file, blocks), strict=True):
            found[name] = _digest(f"{info.shape}".encode(), data)
    return found


def _digest(*parts: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(b"".join(parts))


def _some(names: Sequence[str]) -> Sequence[str]:
    return names[:: max(1, -(-len(names) // MOST_BLOCKS))]


def _small_files(folder: Path) -> Iterator[bytes]:
    for path in sorted({path for pattern in SMALL for path in folder.glob(pattern)}):
        own = path.name == "config.json" or path.name.startswith("manifest") or path.name.endswith(".index.json")
        if not own and path.is_file():
            yield f"{path.name}\n".encode() + read_small(path, TOKENIZER_BYTES)


def check_same_model(lazy: LazyModel, link: Link, host: str) -> None:
    """Raises ``UsageError``, which names the rank and the difference, if a rank has other weights of the same
    architecture: the answers would be those of neither. All ranks call it at the same time."""
    # Copies with different codings can only be compared by the folder that they were made from.
    made_from = identity_of(lazy.checkpoint)
    mine = {"host": host, "made_from": made_from, "coding": lazy.coding, "prints": weight_prints(lazy)}
    gathered = [json.loads(each) for each in link.gather(json.dumps(mine).encode())]
    who = [f"rank {rank} ({each['host']})" if each["host"] else f"rank {rank}" for rank, each in enumerate(gathered)]
    seen: dict[str, tuple[str, int]] = {}
    for rank, each in enumerate(gathered):
        for name, value in each["prints"].items():
            known, owner = seen.setdefault(name, (value, rank))
            if known != value:
                whose = "adapter" if name == ADAPTER_CONFIG else "model"
                has = DIFFERENCES.get(name, "other weights")
                raise UsageError(f"{who[rank]} has {has} than {who[owner]}: copy the {whose}'s folder from there")
        if each["made_from"] != gathered[0]["made_from"] and each["coding"] != gathered[0]["coding"]:
            raise UsageError(
                f"{who[rank]} has a copy with --coding {each['coding']}, {who[0]} one with {gathered[0]['coding']}, "
                "and not of one folder: copy the model's folder from there"
            )
