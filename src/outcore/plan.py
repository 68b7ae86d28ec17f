"""What to keep resident under a budget: numbers in, plan out, no I/O.

The rule: what is not a layer, the caches for the context that was asked for, and one prompt chunk's activations come
first; then two or three slots; then as many whole layers as fit stay resident, spread evenly, so that the disk works
while they are computed. The rest is streamed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from .errors import BudgetError, UsageError
from .layout import slot_bytes
from .sizes import format_size

PREFILL_STEP = 2048
"""Tokens. mlx-lm's default chunk of a prompt; the same chunks give the same bits."""

ENOUGH_STEP = 256
"""Tokens. A larger chunk is hardly faster, since all chunks share a sweep, so layers stay resident first."""

SMALLEST_STEP = 16
"""Tokens of the smallest chunk that a prompt is cut into to save memory."""

STATES = 4
"""Recurrent states that are under way at once beside those of a chunk's tokens."""

MISC_BYTES = 2_000_000
"""Bytes. Tokens, sampling, masks and what else is allocated on the way."""

SLOTS = 3
"""One to compute from, two to read into; with two, reading waits now and then for the compute."""


ALLOCATOR_SHARE, ALLOCATOR_LEAST, ALLOCATOR_MOST = 1 / 32, 500_000, 64_000_000
"""Freed memory that MLX may keep for reuse (``mx.set_cache_limit``): a share of all else, within bounds in bytes."""


@dataclass(frozen=True)
class LayerSize:
    """Bytes of one layer: resident (in the dtype that it is computed in), in a slot, and read from disk a sweep.

    ``cast`` are bytes of copies made on the way, when it is computed in another dtype than it is stored in. Layers of
    one ``kind`` take equally long: same class, same shapes, same dtypes.
    """

    resident: int
    slot: int
    read: int
    cast: int = 0
    streamable: bool = True
    kind: str = ""


@dataclass(frozen=True)
class ModelSize:
    """What a plan needs to know of a model. Bytes, per token where said.

    Attributes:
        non_layer: embeddings, norms, head, and every 1-D parameter; ``tables`` and ``head`` included.
        cache: KV and recurrent states for the whole context.
        token: activations per token of a chunk.
        hidden: a layer's input and output per token: those of a whole prompt are held while it is computed in chunks.
        score: attention scores per token of a chunk and token of context.
        window: KV per token of a chunk that sliding windows keep beyond their size until the next token comes.
        state: a recurrent state, where a recurrence is computed token by token and keeps one for each.
        logits: one token's logits and what sampling makes of them.
        prompt: tokens of the longest prompt, at most ``context``.
        tables: embeddings that are only looked up in, so that rows of them can be read for the tokens at hand.
        head: what is multiplied with outside of layers (the head, tied embeddings), if it can be streamed in slices;
            ``slot`` is the largest slice's.
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

    def activations(self, chunk: int) -> int:
        """Bytes that one pass over ``chunk`` tokens needs besides weights and caches."""
        held = self.hidden * self.prompt + (chunk + STATES) * self.state
        return held + chunk * (self.token + self.score * self.context + self.window) + self.logits + MISC_BYTES


@dataclass(frozen=True)
class Plan:
    """What is resident, what is streamed, and where the bytes go. All sizes in bytes.

    Attributes:
        resident, streamed: indices of layers.
        head_streamed: the head is streamed in slices.
        prefill_step: tokens of a prompt computed at a time.
        smallest_budget_bytes: the smallest budget with which this model, context and number of slots would work.
    """

    budget_bytes: int
    resident: tuple[int, ...]
    streamed: tuple[int, ...]
    head_streamed: bool
    slots: int
    slot_bytes: int
    weight_bytes: int
    cache_bytes: int
    activation_bytes: int
    allocator_bytes: int
    prefill_step: int
    context: int
    bytes_per_token: int
    smallest_budget_bytes: int

    @property
    def streams(self) -> bool:
        """Whether anything at all is streamed."""
        return bool(self.streamed) or self.head_streamed

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
) -> Plan:
    """Decide what stays resident within ``budget`` bytes.

    Args:
        slots: number of slots, at least 2; chosen when None.
        resident: number of resident layers; as many as fit when None.
        head_resident: whether the head stays in memory; None: it is streamed only where nothing else would fit.
        prefill_step: tokens of a prompt at a time; mlx-lm's 2048 where it fits when None, else less.

    Raises:
        BudgetError: the budget is too small; says the smallest that works.
        UsageError: fewer than 2 slots, or a negative number of resident layers.
    """
    if slots is not None and slots < 2:
        raise UsageError(f"--slots {slots}: at least 2 are needed, one to compute from and one to read into")
    if resident is not None and not 0 <= resident <= len(size.layers):
        raise UsageError(f"--resident {resident}: this model has {len(size.layers)} layers")
    if prefill_step is not None and prefill_step < 1:
        raise UsageError(f"--prefill-step-size {prefill_step}: at least 1 token")
    steps = [prefill_step] if prefill_step else _steps(size.prompt)
    counts = range(len(size.layers), -1, -1) if resident is None else [resident]
    heads = [False] if size.head is None or head_resident else [True] if head_resident is False else [False, True]
    least = min(_plan(size, budget, n, slots or 2, steps[-1], head).peak_bytes for n in counts for head in heads)

    def fits(count: int, ring: int, step: int, head: bool = False) -> Plan | None:
        plan = _plan(size, budget, count, ring, step, head, least)
        return plan if plan.peak_bytes <= budget else None

    if resident is None and False in heads:
        # Nothing streamed beats any chunk size.
        for step in steps:
            if plan := fits(len(size.layers), 0, step):
                return plan
    enough = [s for s in steps if s <= ENOUGH_STEP] or steps
    for head, step, ring in product(heads, enough, [slots] if slots else [SLOTS, 2]):
        for count in counts:
            if plan := fits(count, ring, step, head):
                larger = (fits(count, ring, s, head) for s in steps if s > step)
                return next((p for p in larger if p), plan)
    what = f" with {resident} resident layers" if resident else ""
    raise BudgetError(
        f"a budget of {format_size(budget)} is too small for this model{what} and a context of {size.context} "
        f"tokens: the smallest that works is {format_size(least, round_up=True)}",
        least,
    )


def resident_budget(size: ModelSize) -> int:
    """The smallest budget in bytes with which everything stays resident."""
    return _plan(size, 0, len(size.layers), 0, _steps(size.prompt)[-1], False).peak_bytes


def _steps(prompt: int) -> list[int]:
    step, smallest = min(PREFILL_STEP, prompt), min(SMALLEST_STEP, prompt)
    steps = []
    while step > smallest:
        steps.append(step)
        step //= 2
    return [*steps, smallest]


def _plan(
    size: ModelSize, budget: int, count: int, slots: int, step: int, head_streamed: bool, smallest: int = 0
) -> Plan:
    fixed = [i for i, layer in enumerate(size.layers) if not layer.streamable]
    free = [i for i, layer in enumerate(size.layers) if layer.streamable]
    chosen = spread(max(0, count - len(fixed)), len(free))
    resident = sorted([*fixed, *(free[i] for i in chosen)])
    streamed = [i for i in free if i not in set(resident)]
    units = [size.layers[i] for i in streamed]
    weights = size.non_layer + sum(size.layers[i].resident for i in resident)
    if head_streamed and size.head is not None:
        units.append(size.head)
        weights -= size.head.resident
    if units:
        weights -= size.tables
    plan = Plan(
        budget_bytes=budget,
        resident=tuple(resident),
        streamed=tuple(streamed),
        head_streamed=head_streamed,
        slots=slots if units else 0,
        slot_bytes=slot_bytes(max(u.slot for u in units)) if units else 0,
        weight_bytes=weights,
        cache_bytes=size.cache,
        activation_bytes=size.activations(step) + max((u.cast for u in units), default=0),
        allocator_bytes=0,
        prefill_step=step,
        context=size.context,
        bytes_per_token=sum(u.read for u in units),
        smallest_budget_bytes=smallest,
    )
    allocator = int(min(max(plan.peak_bytes * ALLOCATOR_SHARE, ALLOCATOR_LEAST), ALLOCATOR_MOST))
    return replace(plan, allocator_bytes=allocator)


def spread(count: int, of: int) -> list[int]:
    """``count`` indices out of ``range(of)``, as evenly spaced as whole numbers allow, none at the very start."""
    return [((2 * i + 1) * of) // (2 * count) for i in range(count)]


