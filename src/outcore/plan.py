"""What to keep resident under a budget: numbers in, plan out, no I/O.

The rule: what is not a layer, the caches for the context that was asked for, and one prompt chunk's activations come
first; then two or three slots for whole layers or parts of them; then as many whole layers as fit stay resident, spread
evenly, so that the disk works while they are computed, and single projections of others with what is left. The rest is
streamed. Among the sizes and numbers of slots that fit, the one whose simulated sweep is shortest is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from itertools import product

from .calibration import Calibration
from .errors import BudgetError, UsageError
from .layout import GAP, slot_bytes
from .simulate import Stage, Timing, simulate
from .sizes import format_size

PREFILL_STEP = 2048
"""Tokens. mlx-lm's default chunk of a prompt; the same chunks give the same bits."""

ENOUGH_STEP = 256
"""Tokens. A larger chunk is hardly faster, since all chunks share a sweep, so layers stay resident first."""

SMALLEST_STEP = 16
"""Tokens of the smallest chunk that a prompt is cut into to save memory."""

KV_STEP = 256
"""Tokens by which mlx-lm's KV caches grow (``KVCache.step``)."""

STATES = 4
"""Recurrent states that are under way at once beside those of a chunk's tokens."""

MISC_BYTES = 2_000_000
"""Bytes. Tokens, sampling, masks and what else is allocated on the way."""

SLOTS = (3, 2)
"""Numbers of slots that are looked at: one to compute from, two to read into, or one where memory is short."""

WORTH = 0.99
"""A plan with more units, fewer slots or smaller chunks is taken if it takes less than this share of the time."""

ANSWER = 256
"""Tokens of an answer, for weighing the prompt's time against a token's."""

PLACEMENTS = ("even", "interleaved", "first", "last")
"""Where resident layers lie: spread evenly, every second one first, at the beginning, at the end."""

ASSUMED = Calibration()

ALLOCATOR_SHARE, ALLOCATOR_LEAST, ALLOCATOR_MOST = 1 / 32, 500_000, 64_000_000
"""Freed memory that MLX may keep for reuse (``mx.set_cache_limit``): a share of all else, within bounds in bytes."""


@dataclass(frozen=True)
class PieceSize:
    """Bytes of one piece of a layer, as in ``LayerSize``."""

    resident: int
    slot: int
    read: int
    cast: int = 0


@dataclass(frozen=True)
class LayerSize:
    """Bytes of one layer: resident (in the dtype that it is computed in), in a slot, and read from disk a sweep.

    ``cast`` are bytes of copies made on the way, when it is computed in another dtype than it is stored in. Layers of
    one ``kind`` take equally long: same class, same shapes, same dtypes. ``pieces`` are its parts that can stay in
    memory by themselves; where the layer is ``splittable`` they are in the order of their calls, and can be streamed by
    themselves too.
    """

    resident: int
    slot: int
    read: int
    cast: int = 0
    streamable: bool = True
    kind: str = ""
    pieces: tuple[PieceSize, ...] = ()
    splittable: bool = False


@dataclass(frozen=True)
class ModelSize:
    """What a plan needs to know of a model. Bytes, per token where said.

    Attributes:
        non_layer: embeddings, norms, head, and every 1-D parameter; ``tables`` and ``head`` included.
        cache: KV and recurrent states for the whole context; ``growing``: for each cache that grows with it, bytes
            per token and tokens at most (None: no limit).
        token: activations per token of a chunk.
        hidden: a layer's input and output per token: those of a whole prompt are held while it is computed in chunks.
        between: what a layer's pieces put out, per token: that of a whole prompt is held where it is streamed in parts.
        score: attention scores per token of a chunk and token of context.
        window: KV per token of a chunk that sliding windows keep beyond their size until the next token comes.
        state: a recurrent state, where a recurrence is computed token by token and keeps one for each.
        logits: one token's logits and what sampling makes of them.
        prompt: tokens of the longest prompt, at most ``context``.
        tables: embeddings that are only looked up in, so that rows of them can be read for the tokens at hand.
        head: what is multiplied with outside of layers (the head, tied embeddings), if it can be streamed in slices;
            ``slot`` is the smallest slice's; slices are as large as the slots. ``cast`` is that of all of it.
        rest_kind: the kind of all that is computed outside of layers.
    """

    layers: tuple[LayerSize, ...]
    non_layer: int
    cache: int
    token: int
    hidden: int
    score: int
    window: int
    state: int
    logits: int
    context: int
    prompt: int
    tables: int = 0
    head: LayerSize | None = None
    rest_kind: str = ""
    between: int = 0
    growing: tuple[tuple[int, int | None], ...] = ()

    def at_context(self, context: int) -> ModelSize:
        """The same model with room for another number of tokens: full attention's caches grow with them, sliding
        windows' to their size, recurrent states not at all."""
        cache = self.cache + self._grown(context) - self._grown(self.context)
        return replace(self, context=context, prompt=min(self.prompt, context), cache=cache)

    def _grown(self, context: int) -> int:
        # mlx-lm's caches grow by 256 tokens at a time, and hold the token after the last.
        tokens = -(-(context + 1) // KV_STEP) * KV_STEP
        return sum(each * min(tokens, most or tokens) for each, most in self.growing)

    def activations(self, chunk: int, in_parts: bool = False) -> int:
        """Bytes that one pass over ``chunk`` tokens needs besides weights and caches, where layers are streamed whole
        or in parts."""
        held = self.hidden * self.prompt + (chunk + STATES) * self.state
        if in_parts:
            held += self.between * max(0, self.prompt - chunk)
        return held + chunk * (self.token + self.score * self.context + self.window) + self.logits + MISC_BYTES


@dataclass(frozen=True)
class StreamedPart:
    """What is streamed as one piece: pieces of a layer, by their numbers; none stands for the whole layer. Bytes."""

    layer: int
    pieces: tuple[int, ...]
    slot: int
    read: int
    cast: int = 0


@dataclass(frozen=True)
class Plan:
    """What is resident, what is streamed, and where the bytes go. All sizes in bytes.

    Attributes:
        resident: indices of layers that stay in memory as a whole; streamed: those of which something is streamed.
        kept: pieces of streamed layers that stay in memory.
        parts: what is streamed, in the order of layers and of calls inside them; the head is not one of them.
        head_streamed: the head is streamed in slices of at most ``unit_bytes``.
        unit_bytes: the largest unit that a slot holds.
        prefill_step: tokens of a prompt computed at a time.
        smallest_budget_bytes: the smallest budget with which this model, context and number of slots would work.
        token_s, ttft_s: predicted seconds for a token, and from a prompt of ``prompt`` tokens to the first one.
        calibrated: the prediction rests on measurements of this machine, not on assumptions.
    """

    budget_bytes: int
    resident: tuple[int, ...]
    streamed: tuple[int, ...]
    kept: tuple[tuple[int, tuple[int, ...]], ...]
    parts: tuple[StreamedPart, ...]
    head_streamed: bool
    slots: int
    unit_bytes: int
    weight_bytes: int
    cache_bytes: int
    activation_bytes: int
    allocator_bytes: int
    prefill_step: int
    context: int
    bytes_per_token: int
    smallest_budget_bytes: int
    token_s: float = 0.0
    ttft_s: float = 0.0
    calibrated: bool = False

    @property
    def streams(self) -> bool:
        """Whether anything at all is streamed."""
        return bool(self.streamed) or self.head_streamed

    @property
    def run_s(self) -> float:
        """Seconds for a prompt and an answer, by which plans are compared."""
        return self.ttft_s + ANSWER * self.token_s

    @property
    def slot_bytes(self) -> int:
        """Bytes of memory that a slot takes."""
        return slot_bytes(self.unit_bytes) if self.slots else 0

    @property
    def split(self) -> bool:
        """Whether parts of layers are streamed one after the other."""
        return len(self.parts) > len(self.streamed)

    @property
    def peak_bytes(self) -> int:
        """Most bytes in use at once, if all goes as planned."""
        return (
            self.weight_bytes
            + self.slots * self.slot_bytes
            + self.cache_bytes
            + self.activation_bytes
            + self.allocator_bytes
        )


def make_plan(
    size: ModelSize,
    budget: int,
    *,
    slots: int | None = None,
    resident: int | None = None,
    prefill_step: int | None = None,
    head_resident: bool | None = None,
    placement: str = "even",
    calibration: Calibration = ASSUMED,
) -> Plan:
    """Decide what stays resident within ``budget`` bytes.

    Args:
        slots: number of slots, at least 2; chosen when None.
        resident: number of resident layers, and nothing of the others; as many as fit when None.
        head_resident: whether the head stays in memory; None: it is streamed only where nothing else would fit.
        prefill_step: tokens of a prompt at a time; mlx-lm's 2048 where it fits when None, else less.
        placement: one of ``PLACEMENTS``.
        calibration: what the machine does.

    Raises:
        BudgetError: the budget is too small; says the smallest that works.
        UsageError: fewer than 2 slots, a number of layers that the model does not have, an unknown placement.
    """
    if slots is not None and slots < 2:
        raise UsageError(f"--slots {slots}: at least 2 are needed, one to compute from and one to read into")
    if resident is not None and not 0 <= resident <= len(size.layers):
        raise UsageError(f"--resident {resident}: this model has {len(size.layers)} layers")
    if prefill_step is not None and prefill_step < 1:
        raise UsageError(f"--prefill-step-size {prefill_step}: at least 1 token")
    if placement not in PLACEMENTS:
        raise UsageError(f"--placement {placement}: choose one of {', '.join(PLACEMENTS)}")
    steps = [prefill_step] if prefill_step else prefill_steps(size.prompt)
    heads = [False] if size.head is None or head_resident else [True] if head_resident is False else [False, True]
    counts = range(len(size.layers), -1, -1) if resident is None else [resident]
    # Whole layers first: of plans that are equally fast the one with the fewest units is taken.
    units = _unit_sizes(size)

    def drafts(head: bool, step: int, ring: int) -> Iterator[_Draft]:
        for unit in units:
            for count in counts:
                yield _Draft(size, chosen(count), head, step, ring, unit)

    @cache
    def chosen(count: int) -> frozenset[int]:
        return frozenset(place(size, count, placement))

    least = min(d.peak for head in heads for d in drafts(head, steps[-1], slots or 2))

    def finish(draft: _Draft, fill: bool) -> Plan:
        filled = draft.fill(budget) if fill else draft
        return filled.plan(budget, least, calibration)

    if resident is None and False in heads:
        # Nothing streamed beats any chunk size.
        everything = (_Draft(size, chosen(len(size.layers)), False, step, 0, 0) for step in steps)
        if draft := next((d for d in everything if d.peak <= budget), None):
            return finish(draft, False)
    enough = [s for s in steps if s <= ENOUGH_STEP] or steps
    for head in heads:
        best: Plan | None = None
        for step, ring, unit in product(enough, [slots] if slots else SLOTS, units):
            fitting = (_Draft(size, chosen(n), head, step, ring, unit) for n in counts)
            if draft := next((d for d in fitting if d.peak <= budget), None):
                plan = finish(draft, resident is None)
                if best is None or plan.run_s < best.run_s * WORTH:
                    best = plan
        if best is not None:
            # A larger chunk, if what could not be used otherwise has room for it.
            left = budget - best.peak_bytes
            larger = (s for s in steps if s > best.prefill_step)
            for step in larger:
                more = size.activations(step, best.split) - size.activations(best.prefill_step, best.split)
                if more <= left:
                    return replace(best, prefill_step=step, activation_bytes=best.activation_bytes + more)
            return best
    what = f" with {resident} resident layers" if resident else ""
    raise BudgetError(
        f"a budget of {format_size(budget)} is too small for this model{what} and a context of {size.context} "
        f"tokens: the smallest that works is {format_size(least, round_up=True)}",
        least,
    )


def replan(size: ModelSize, plan: Plan, resident: Iterable[int], calibration: Calibration) -> Plan:
    """The plan with other layers resident, the ring as it is; for a model that may have grown."""
    stay = frozenset(resident)
    kept = tuple((i, pieces) for i, pieces in plan.kept if i not in stay)
    draft = _Draft(size, stay, plan.head_streamed, plan.prefill_step, plan.slots, plan.unit_bytes, kept)
    bare = replace(draft.bare, unit_bytes=plan.unit_bytes) if plan.slots else draft.bare
    return predict(
        size,
        replace(bare, budget_bytes=plan.budget_bytes, smallest_budget_bytes=plan.smallest_budget_bytes),
        calibration,
    )


def resident_budget(size: ModelSize) -> int:
    """The smallest budget in bytes with which everything stays resident."""
    return _Draft(size, frozenset(range(len(size.layers))), False, prefill_steps(size.prompt)[-1], 0, 0).peak


def prefill_steps(prompt: int) -> list[int]:
    """Chunks that a prompt may be cut into, in tokens, largest first."""
    step, smallest = min(PREFILL_STEP, prompt), min(SMALLEST_STEP, prompt)
    steps = []
    while step > smallest:
        steps.append(step)
        step //= 2
    return [*steps, smallest]


def place(size: ModelSize, count: int, placement: str = "even") -> list[int]:
    """Which ``count`` layers stay resident; at least those that cannot be streamed."""
    fixed = [i for i, layer in enumerate(size.layers) if not layer.streamable]
    free = [i for i, layer in enumerate(size.layers) if layer.streamable]
    wanted = max(0, count - len(fixed))
    if placement == "first":
        chosen = list(range(wanted))
    elif placement == "last":
        chosen = list(range(len(free) - wanted, len(free)))
    elif placement == "interleaved":
        chosen = [*range(1, len(free), 2), *range(0, len(free), 2)][:wanted]
    else:
        chosen = spread(wanted, len(free))
    return sorted([*fixed, *(free[i] for i in chosen)])


def spread(count: int, of: int) -> list[int]:
    """``count`` indices out of ``range(of)``, as evenly spaced as whole numbers allow, none at the very start."""
    return [((2 * i + 1) * of) // (2 * count) for i in range(count)]


@dataclass(frozen=True)
class _Draft:
    """A plan being made: everything but what it predicts."""

    size: ModelSize
    resident: frozenset[int]
    head: bool
    step: int
    slots: int
    unit: int
    kept: tuple[tuple[int, tuple[int, ...]], ...] = ()

    @cached_property
    def parts(self) -> tuple[StreamedPart, ...]:
        kept = dict(self.kept)
        found: list[StreamedPart] = []
        for i, layer in enumerate(self.size.layers):
            if i not in self.resident:
                found += (replace(p, layer=i) for p in split_layer(layer, kept.get(i, ()), self.unit))
        return tuple(found)

    @cached_property
    def unit_bytes(self) -> int:
        largest = max((p.slot for p in self.parts), default=0)
        if self.head and self.size.head is not None:
            # Slices are as large as other units are, or as slots may be where there are none.
            largest = max(largest or self.unit, self.size.head.slot)
        return largest

    @cached_property
    def peak(self) -> int:
        return self.bare.peak_bytes

    @cached_property
    def bare(self) -> Plan:
        size, parts = self.size, self.parts
        weights = size.non_layer + sum(size.layers[i].resident for i in self.resident)
        weights += sum(size.layers[i].pieces[n].resident for i, numbers in self.kept for n in numbers)
        streamed = tuple(dict.fromkeys(p.layer for p in parts))
        casts = [p.cast for p in parts]
        read = sum(p.read for p in parts)
        if self.head and size.head is not None:
            weights -= size.head.resident
            casts.append(-(-size.head.cast * self.unit_bytes // max(size.head.read, self.unit_bytes)))
            read += size.head.read
        if streams := bool(parts) or self.head:
            weights -= size.tables
        plan = Plan(
            budget_bytes=0,
            resident=tuple(sorted(self.resident)),
            streamed=streamed,
            kept=self.kept,
            parts=parts,
            head_streamed=self.head,
            slots=self.slots if streams else 0,
            unit_bytes=self.unit_bytes if streams else 0,
            weight_bytes=weights,
            cache_bytes=size.cache,
            activation_bytes=size.activations(self.step, len(parts) > len(streamed)) + max(casts, default=0),
            allocator_bytes=0,
            prefill_step=self.step,
            context=size.context,
            bytes_per_token=read,
            smallest_budget_bytes=0,
        )
        allocator = int(min(max(plan.peak_bytes * ALLOCATOR_SHARE, ALLOCATOR_LEAST), ALLOCATOR_MOST))
        return replace(plan, allocator_bytes=allocator)

    def fill(self, budget: int) -> _Draft:
        """Keep single pieces, the largest that fit first, with what whole layers have left over."""
        draft = self
        # Freed memory kept for reuse grows with the rest.
        left = int((budget - self.peak) / (1 + ALLOCATOR_SHARE))
        streamed = [i for i in range(len(self.size.layers)) if i not in self.resident]
        kept: dict[int, tuple[int, ...]] = {}
        while left > 0:
            free = [
                (piece.resident, i, n)
                for i in streamed
                for n, piece in enumerate(self.size.layers[i].pieces)
                if piece.resident <= left and n not in kept.get(i, ()) and len(self.size.layers[i].pieces) > 1
                and len(kept.get(i, ())) + 1 < len(self.size.layers[i].pieces)
            ]
            if not free:
                break
            largest = max(nbytes for nbytes, _, _ in free)
            alike = [(i, n) for nbytes, i, n in free if nbytes == largest]
            i, n = alike[len(alike) // 2]
            kept[i] = tuple(sorted((*kept.get(i, ()), n)))
            left -= largest
        filled = replace(draft, kept=tuple(sorted(kept.items())))
        return filled if filled.peak <= budget else self

    def plan(self, budget: int, least: int, calibration: Calibration) -> Plan:
        plan = replace(self.bare, budget_bytes=budget, smallest_budget_bytes=least)
        return predict(self.size, plan, calibration)


@lru_cache(maxsize=4096)
def split_layer(layer: LayerSize, kept: tuple[int, ...], unit: int) -> tuple[StreamedPart, ...]:
    """A streamed layer without the pieces that stay in memory, in parts of at most ``unit`` bytes if it can be split.

    The fewest parts that do, and those as equal as their order allows: a ring of unequal units waits for the large
    ones. A piece larger than ``unit`` is a part of its own.
    """
    left = [n for n in range(len(layer.pieces)) if n not in kept]
    if not kept and (layer.slot <= unit or not layer.splittable):
        return (StreamedPart(0, (), layer.slot, layer.read, layer.cast),)
    groups = [left]
    if layer.splittable:
        limits = sorted({_joined(layer, left[a:b]) for a in range(len(left)) for b in range(a + 1, len(left) + 1)})
        largest = max(_joined(layer, [n]) for n in left)
        fewest = len(_pack(layer, left, max(unit, largest)))
        groups = next(g for limit in limits if limit >= largest and len(g := _pack(layer, left, limit)) <= fewest)
    return tuple(
        StreamedPart(
            0,
            tuple(g),
            _joined(layer, g),
            sum(layer.pieces[n].read for n in g),
            sum(layer.pieces[n].cast for n in g),
        )
        for g in groups
    )


def _joined(layer: LayerSize, pieces: Sequence[int]) -> int:
    """Bytes in a slot of some pieces together, at most: what lies between two of them in a file may be read too."""
    return min(layer.slot, sum(layer.pieces[n].slot for n in pieces) + GAP * (len(pieces) - 1))


def _pack(layer: LayerSize, pieces: Sequence[int], limit: int) -> list[list[int]]:
    groups: list[list[int]] = [[]]
    for n in pieces:
        if groups[-1] and _joined(layer, [*groups[-1], n]) > limit:
            groups.append([])
        groups[-1].append(n)
    return groups


def _unit_sizes(size: ModelSize) -> list[int]:
    """Sizes of units that are worth looking at, in bytes: whole layers, then their halves, thirds and so on."""
    layers = {layer for layer in size.layers if layer.streamable}
    whole = max((layer.slot for layer in layers), default=0)
    splittable = [layer for layer in layers if layer.splittable and len(layer.pieces) > 1]
    # What cannot be split needs slots of its size, if it is streamed.
    least = max((max(_joined(x, [n]) for n in range(len(x.pieces))) for x in splittable), default=whole)
    if not splittable or len(splittable) < len(layers):
        least = max(least, *(x.slot for x in layers if x not in splittable), 0) if layers else 0
    sizes = [whole]
    for parts in range(2, 9):
        limit = max(least, -(-whole // parts))
        found = max((p.slot for x in layers for p in split_layer(x, (), limit)), default=whole)
        if found < sizes[-1]:
            sizes.append(found)
    if sizes[-1] > least:
        sizes.append(max((p.slot for x in layers for p in split_layer(x, (), least)), default=whole))
    return sizes


def predict(size: ModelSize, plan: Plan, calibration: Calibration) -> Plan:
    """The plan with the seconds that it will take on a calibrated machine."""
    token = _timing(size, plan, calibration, [1])
    prompt = _timing(size, plan, calibration, _passes(size.prompt, plan.prefill_step))
    known = calibration.seconds(size.rest_kind, 1) is not None
    return replace(plan, token_s=token.sweep_s, ttft_s=prompt.first_s, calibrated=calibration.measured and known)


def _passes(prompt: int, step: int) -> list[int]:
    """Tokens of each pass of a prompt: chunks, and the last token by itself."""
    whole, rest = divmod(max(0, prompt - 1), step)
    return [step] * whole + ([rest] if rest else []) + [1]


def _timing(size: ModelSize, plan: Plan, calibration: Calibration, passes: Sequence[int]) -> Timing:
    rate = calibration.read_gbps * 1e9
    parts: dict[int, list[StreamedPart]] = {}
    for part in plan.parts:
        parts.setdefault(part.layer, []).append(part)
    stages: list[Stage] = []
    pending = 0.0  # of resident layers: on the device's queue with the next streamed one
    for i, layer in enumerate(size.layers):
        compute = _compute(layer.kind, layer.resident, calibration, passes)
        mine = parts.get(i, [])
        if not mine:
            pending += compute
            continue
        total = sum(p.read for p in mine)
        if pending:
            stages.append(Stage(pending))
            pending = 0.0
        for p in mine:
            share = p.read / total if total else 1 / len(mine)
            stages.append(Stage(compute * share + calibration.sync_s, p.read / rate))
    head = size.head if plan.head_streamed else None
    outside = size.non_layer - size.tables - (head.resident if head is not None else 0)
    # Of a prompt only the last token gets logits.
    rest = _compute(size.rest_kind, outside + (head.resident if head is not None else 0), calibration, passes[-1:])
    if plan.streams and size.tables:
        rest += calibration.read_latency_s
    if head is not None:
        slices = max(1, -(-head.read // max(plan.unit_bytes, 1)))
        stages += [Stage(rest / slices + calibration.sync_s, head.read / slices / rate)] * slices
    else:
        stages.append(Stage(pending + rest))
        pending = 0.0
    if pending:
        stages.append(Stage(pending))
    return simulate(
        stages,
        max(plan.slots, 2),
        read_slowdown=calibration.read_slowdown,
        compute_slowdown=calibration.compute_slowdown,
    )


def _compute(kind: str, nbytes: int, calibration: Calibration, passes: Sequence[int]) -> float:
    """Seconds of some passes over a layer, or what is not a layer; a guess by its bytes where it was not measured."""
    known = [calibration.seconds(kind, tokens) for tokens in passes]
    return sum(
        s if s is not None else nbytes / calibration.weight_gbps / 1e9 * max(1.0, tokens / 32)
        for s, tokens in zip(known, passes, strict=True)
    )
