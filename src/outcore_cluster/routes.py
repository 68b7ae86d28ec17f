"""What of layers' outputs goes from which rank to which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .cuts import Cuts


def fillable(cuts: Cuts, owners: Sequence[int]) -> bool:
    """Whether the first rank can be sent what all layers are made from that write to caches."""
    used = {leaf for call in cuts.calls.values() if call.advances for leaf in call.uses}
    return all(owners[layer] == 0 or cuts.calls[layer].leaves[n] is not None for layer, n in used)


def routes(
    cuts: Cuts, owners: Sequence[int], rank: int, filled: bool
) -> tuple[dict[int, frozenset[int]], dict[int, dict[int, tuple[int, ...]]]]:
    """What a rank needs of others' layers: their numbers, and those of outputs; and what others need of its own: ranks,
    by layer and output. ``filled``: the first rank needs what layers are made from that write to caches."""
    uses = [(owners[i], call.uses) for i, call in cuts.calls.items()] + [(0, cuts.results)]
    uses += [(0, call.uses) for call in cuts.calls.values() if filled and call.advances]
    wanted: dict[int, set[int]] = {}
    sent: dict[int, dict[int, set[int]]] = {}
    for user, leaves in uses:
        for layer, n in leaves:
            if owners[layer] == user:
                continue
            if user == rank:
                wanted.setdefault(layer, set()).add(n)
            if owners[layer] == rank:
                sent.setdefault(layer, {}).setdefault(n, set()).add(user)
    to_ranks = {layer: {n: tuple(sorted(ranks)) for n, ranks in sorted(to.items())} for layer, to in sent.items()}
    return {layer: frozenset(found) for layer, found in wanted.items()}, to_ranks


def reusable(cuts: Cuts, wanted: Mapping[int, frozenset[int]]) -> set[int]:
    """Layers whose outputs the next layer alone is made from, so that their memory is free when that was sent."""
    behind = dict(zip(cuts.order, cuts.order[1:], strict=False))
    users: dict[int, set[int | None]] = {}
    for i, uses in [*((i, call.uses) for i, call in cuts.calls.items()), (None, cuts.results)]:
        for layer, _ in uses:
            users.setdefault(layer, set()).add(i)
    return {layer for layer in wanted if layer in behind and users[layer] == {behind[layer]}}
