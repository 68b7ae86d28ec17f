"""Shares a model and its draft out over ranks.

Rank 0 drafts for all ranks and sends them its drafts. A draft model that is a copy of the model continues from the
model's own caches, but each rank has only the caches of its own layers. So rank 0 calls the copies of other ranks'
layers to fill their caches (``PipelineStage.fill``). Another draft model has caches of its own. To a drafter that reads
layers' outputs (``Draft.reads``) the other ranks send them, as they do to the rank of the next layer.

First, ranks check by digests that their copies of the model have the same weights, in whatever form these are stored:
some bytes of each parameter, and of packed copies the checksums of whole files. Then it is chosen which rank has which
layers.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import xxhash
from mlx.utils import tree_flatten

from outcore.checkpoint.checkpoint import ADAPTER, ADAPTER_CONFIG, TensorInfo, read_header, read_object
from outcore.checkpoint.identity import MOST_BLOCKS, block_of, code_print, identity_of, read_blocks
from outcore.checkpoint.lazy_model import LazyModel
from outcore.checkpoint.manifest import MANIFEST, is_packed, read_manifest
from outcore.decode.opening import Opening
from outcore.decode.preparation import draft_kind
from outcore.decode.speculative.sources import with_draft
from outcore.engine.model_profile import ModelProfile
from outcore.errors import OutcoreError, UsageError, called
from outcore.machine.small_files import CONFIG_BYTES, TOKENIZER_BYTES, read_small
from outcore.options import LoadOptions
from outcore.plan.joint_plan import NGRAM, Draft
from outcore.plan.machine_profile import Calibration
from outcore.plan.planner import ASSUMED, ENOUGH_STEP, SLOTS

from .cuts import Cuts
from .link_protocol import Link
from .rank_share import cuts_of, share_out
from .stage import fillable
from .timing import LinkTimes, RankStage, steady_s

if TYPE_CHECKING:
    from .group import RankGroup


@dataclass(frozen=True)
class RankMeans:
    """A rank's resources.

    Attributes:
        memory: bytes for layers and slots. ``ring``: bytes of it that slots take if any layer is streamed.
        rate: bytes per second that its disk reads. ``compute_rate``: bytes of weights per second that it computes with.
    """

    memory: int
    rate: float
    ring: int = 0
    compute_rate: float = 1e10


# If layers alternate between ranks: how many consecutive groups of layers one rank gets at a time.
WINDOWS = (1, 2, 4)

# Slots of a rank's ring in this estimate.
RING = 3

# Assumed seconds of a message from one rank to another if the link was not measured.
HOP_S = 0.0005


def share_layers(
    nbytes: Sequence[int], groups: Sequence[Sequence[int]], ranks: Sequence[RankMeans], hop_s: float = HOP_S
) -> list[int]:
    """Returns the rank of each layer, in the order of calls.

    If all ranks together can hold the layers in memory, each rank gets consecutive layers, so that few outputs are
    sent. Shares are by compute rate, since ranks compute chunks of a prompt at the same time, or by memory if those do
    not fit. Otherwise layers alternate between ranks, so that each rank reads its next layer while others compute; all
    disks finish at the same time T, with sum(memory + rate T) = bytes. A simulation chooses how many consecutive layers
    a rank then gets: with few, ranks wait less for disks; with many, fewer outputs are sent.

    Args:
        nbytes: of each layer. ``groups``: layers that must lie on one rank; each layer is in one group.
        hop_s: seconds of a message from one rank to another.
    """
    total = sum(nbytes)
    if sum(r.memory for r in ranks) >= total:
        for parts in ([r.compute_rate for r in ranks], [r.memory for r in ranks]):
            owners = in_blocks(nbytes, groups, [part / sum(parts) for part in parts])
            held = [sum(n for n, o in zip(nbytes, owners, strict=True) if o == i) for i in range(len(ranks))]
            if all(h <= r.memory for h, r in zip(held, ranks, strict=True)):
                return owners
    left = [replace(r, memory=max(0, r.memory - r.ring)) for r in ranks]
    shares = fair_shares(total, left)
    ways = []
    for size in WINDOWS:
        together = [groups[n : n + size] for n in range(0, len(groups), size)]
        ways.append(in_turn(nbytes, [[i for group in each for i in group] for each in together], shares))
    ways.append(in_blocks(nbytes, groups, shares))
    return min(ways, key=lambda owners: shared_pass_s(nbytes, owners, left, hop_s))


def shared_pass_s(
    nbytes: Sequence[int], owners: Sequence[int], ranks: Sequence[RankMeans], hop_s: float = HOP_S
) -> float:
    """Predicts the seconds of a pass in which each rank holds the same fraction of each of its layers in memory."""
    held = [sum(n for n, o in zip(nbytes, owners, strict=True) if o == i) for i in range(len(ranks))]
    missing = [max(0.0, 1 - r.memory / h) if h else 0.0 for r, h in zip(ranks, held, strict=True)]
    stages = [
        RankStage(
            o,
            (n / ranks[o].compute_rate,),
            n * missing[o] / ranks[o].rate if ranks[o].rate > 0 else 0.0,
        )
        for n, o in zip(nbytes, owners, strict=True)
    ]
    return steady_s(stages, [RING] * len(ranks), LinkTimes(hop_s))


def fair_shares(total: int, ranks: Sequence[RankMeans]) -> list[float]:
    """Returns, for each rank, the fraction of ``total`` bytes with which all disks finish at the same time."""
    rate = sum(r.rate for r in ranks)
    memory = sum(r.memory for r in ranks)
    if rate <= 0 or memory >= total:
        # No disk has anything to read.
        whole = memory or len(ranks)
        return [(r.memory or (0 if memory else 1)) / whole for r in ranks]
    seconds = (total - memory) / rate
    return [(r.memory + r.rate * seconds) / total for r in ranks]


def in_blocks(nbytes: Sequence[int], groups: Sequence[Sequence[int]], shares: Sequence[float]) -> list[int]:
    """Returns the rank of each layer if each rank gets consecutive layers. A group goes to the rank in whose share the
    middle of the group's bytes lies."""
    owners = [0] * len(nbytes)
    total, done = sum(nbytes), 0.0
    ends = [sum(shares[: n + 1]) for n in range(len(shares))]
    for group in groups:
        mine = sum(nbytes[i] for i in group)
        middle = (done + mine / 2) / max(total, 1)
        rank = next((n for n, end in enumerate(ends) if middle <= end), len(shares) - 1)
        for i in group:
            owners[i] = rank
        done += mine
    return owners


def in_turn(nbytes: Sequence[int], groups: Sequence[Sequence[int]], shares: Sequence[float]) -> list[int]:
    """Returns the rank of each layer if layers alternate: each group goes to the rank that is furthest behind its
    share."""
    owners = [0] * len(nbytes)
    held = [0.0] * len(shares)
    done = 0
    for group in groups:
        mine = sum(nbytes[i] for i in group)
        done += mine
        rank = max(range(len(shares)), key=lambda r: (shares[r] * done - held[r], -r))
        held[rank] += mine
        for i in group:
            owners[i] = rank
    return owners


class SharedModel(NamedTuple):
    """This rank's part of a model, and its draft; ranks other than 0 have no weights of the draft."""

    profile: ModelProfile
    draft: Draft | None


def shared_out(
    profile: ModelProfile, ranks: RankGroup, o: LoadOptions, folder: Path, known: Calibration | None, budget: int
) -> SharedModel:
    """Returns this rank's part of the model, and the draft (n-grams for ``auto``). All ranks call it at the same time.

    Raises:
        UsageError: the model cannot be cut, or the requested draft does not work over several machines.
    """
    cuts, link = cuts_of(profile), ranks.link
    if cuts.refusal is not None:
        kind = profile.lazy.config.get("model_type", "this type")
        raise UsageError(f"a model of type {kind} cannot be shared out over several machines: {cuts.refusal}")
    check_same_model(profile.lazy, link, ranks.host)
    calibration, times = known or ASSUMED, ranks.times
    gathered = link.gather(json.dumps(asdict(_means(profile, link, budget, calibration, o.resident))).encode())
    others = [RankMeans(**json.loads(each)) for each in gathered[1:]]

    def owners(draft: Draft | None, kept: int) -> tuple[int, ...]:
        # Only rank 0 has the draft in its memory, and what else is kept for it.
        left = budget - kept - (draft.weights + draft.cache if draft is not None else 0)
        if is_filled(draft):
            left -= profile.size.cache - profile.size.cache // link.size
        means = [_means(profile, link, left, calibration, o.resident), *others]
        at = {i: n for n, i in enumerate(cuts.order)}
        groups = [[at[i] for i in group] for group in cuts.groups]
        nbytes = [profile.size.layers[i].resident for i in cuts.order]
        # While decoding, one layer sends the next at most the hidden state of a token.
        return tuple(share_layers(nbytes, groups, means, times.hop_s(max(_hidden(cuts), default=0))))

    if link.rank:
        found = json.loads(link.agree(b""))
        if "refused" in found:
            raise UsageError(found["refused"])
        draft = None if found["draft"] is None else Draft(NGRAM, found["draft"])
    else:
        try:
            drafted, draft = with_draft(*draft_kind(o), profile, Opening(folder, o, known))
            mine = owners(draft, drafted.size.rest - profile.size.rest)
            profile = replace(profile, size=replace(profile.size, rest=drafted.size.rest))
            check_sendable(draft, profile, cuts, dict(zip(cuts.order, mine, strict=True)))
            found = {"owners": mine, "filled": is_filled(draft), "draft": None if draft is None else draft.name}
            found["read"] = [] if draft is None else draft.reads
        except OutcoreError as e:
            # The message names rank 0, so that a launcher does not repeat it for each rank.
            who = f"rank 0 ({ranks.host})" if ranks.host else "rank 0"
            link.agree(json.dumps({"refused": f"{who}: {e}"}).encode())
            raise
        link.agree(json.dumps(found).encode())
    how = {"filled": found["filled"], "read": found["read"]}
    return SharedModel(share_out(profile, cuts, link, tuple(found["owners"]), **how), draft)


def check_sendable(draft: Draft | None, profile: ModelProfile, cuts: Cuts, owners: Mapping[int, int]) -> None:
    """Raises ``UsageError`` if what the draft needs of other ranks' layers cannot be sent. ``owners``: by layer."""
    if draft is None:
        return
    if is_filled(draft) and (profile.trace.evaluates or not fillable(cuts, owners)):
        why = "a copy of this model cannot draft over several machines"
    elif any(n < 0 or (owners[n] and cuts.calls[n].leaves[:1] in ((), (None,))) for n in draft.reads):
        why = "it reads states of this model that cannot be sent to another machine"
    else:
        return
    raise UsageError(f"{called('draft')} {draft.name}: {why}; give ngram or another model")


def is_filled(draft: Draft | None) -> bool:
    """Whether rank 0 fills its caches of other ranks' layers for the draft."""
    return draft is not None and draft.copies_model


def _means(profile: ModelProfile, link: Link, budget: int, calibration: Calibration, resident: int | None) -> RankMeans:
    size = profile.size
    outside = size.non_layer - (size.head.resident if link.rank and size.head is not None else 0)
    fixed = outside + size.cache // link.size + size.activations(min(ENOUGH_STEP, size.prompt))
    ring = SLOTS[0] * max((layer.slot for layer in size.layers), default=0)
    memory = max(0, budget - fixed)
    if resident is not None:
        # ``share_layers`` subtracts the ring.
        memory = min(memory, ring + resident * max((layer.resident for layer in size.layers), default=0))
    return RankMeans(memory, calibration.read_gbps * 1e9, ring, calibration.weight_gbps * 1e9)


def _hidden(cuts: Cuts) -> list[int]:
    """Returns the bytes per token of each layer's outputs."""
    leaves = [[s for s in call.leaves if s is not None] for call in cuts.calls.values()]
    return [sum(math.prod(s.of(1, 1)) * s.dtype.size for s in shapes) for shapes in leaves]


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

    Digests cover one block of each tensor (of at most ``MOST_BLOCKS`` parameters that are used as they lie on disk, of
    an original's other tensors, and of an adapter's); the files of a packed copy; the paths of all parameters; how an
    adapter is applied; the model's own code, configuration, tokenizer and templates.

    Raises:
        OSError: a file cannot be read. StoreError, CheckpointError: the manifest or the adapter is invalid.
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
    """Returns a digest of each tensor's shape and one block of its bytes, wherever in a file the tensor lies."""
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
    """Raises ``UsageError``, which names the rank and the difference, if ranks have different weights of the same
    architecture. All ranks call it at the same time."""
    # Two copies with different codings are the same model only if they were made from the same folder.
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
                f"made from different models: copy the model's folder from {who[0]}"
            )
