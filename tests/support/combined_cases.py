"""Cases in which features meet: what each parameter may be, which pairs cannot meet, and which cases are drawn.

A case is one line, ``kind=dense weights=4bit adapter=none ...``. Those that cannot be are in docs/combinations.toml,
each with its reason: refused by Outcore, by name; not to be had of mlx-lm itself; or without a meaning.
"""

from __future__ import annotations

import itertools
import random
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

PUBLISHED = Path(__file__).parents[2] / "docs" / "combinations.toml"

VALUES: dict[str, tuple[str, ...]] = {
    "kind": ("dense", "sliding", "hybrid", "mla", "moe"),
    "weights": ("float32", "bfloat16", "2bit", "3bit", "4bit", "5bit", "6bit", "8bit", "mxfp4", "nvfp4"),
    "adapter": ("none", "lora", "attention", "dora", "full"),
    "memory": ("resident", "streamed", "pools", "smallest"),
    "draft": ("none", "ngram", "model", "copy", "self", "mtp"),
    "context": ("plain", "kv_bits", "kv_disk", "rotating", "prefix_cold", "prefix_warm", "prefix_restart"),
    "sampling": ("greedy", "ours", "mlx_lm", "processors"),
    "face": ("generate", "session", "batch", "server", "patch", "ranks"),
    "disturbance": ("none", "read", "callback", "interrupt", "pressure", "cancel"),
}

Pair = tuple[tuple[str, str], ...]
"""Values of some parameters, in the order of ``VALUES``."""


@dataclass(frozen=True)
class Case:
    """One value of each parameter."""

    kind: str = "dense"
    weights: str = "float32"
    adapter: str = "none"
    memory: str = "streamed"
    draft: str = "none"
    context: str = "plain"
    sampling: str = "greedy"
    face: str = "generate"
    disturbance: str = "none"

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.values().items())

    def values(self) -> dict[str, str]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def meetings(self, n: int) -> Iterator[Pair]:
        """Every n values that meet in it."""
        return itertools.combinations(self.values().items(), n)


def parsed(line: str) -> Case:
    """A case from its line; what is not said is as in ``Case``.

    Raises:
        ValueError: there is no such parameter, or no such value.
    """
    given = dict(part.split("=", 1) for part in line.split())
    for name, value in given.items():
        if value not in VALUES.get(name, ()):
            raise ValueError(f"{name}={value}: choose {name} from {', '.join(VALUES.get(name, VALUES))}")
    return Case(**given)


@dataclass(frozen=True)
class Constraint:
    """Values that cannot meet.

    Attributes:
        when: of some parameters, the values of which any is meant.
        by: ``outcore`` refuses it, ``mlx-lm`` has no answer to compare with, ``nothing`` is meant by it, or only a
            ``gpu`` computes it.
        says: what Outcore's refusal has to say, as a regular expression.
        reason: for people.
        example: further values of the case that shows the refusal.
    """

    when: Mapping[str, tuple[str, ...]]
    by: str
    reason: str
    says: str = ""
    example: str = ""

    def holds(self, values: Mapping[str, str]) -> bool:
        return all(values.get(name) in among for name, among in self.when.items())

    def examples(self) -> Iterator[Case]:
        """A case for each way in which its values meet."""
        more = dict(part.split("=", 1) for part in self.example.split())
        for chosen in itertools.product(*self.when.values()):
            yield Case(**(more | dict(zip(self.when, chosen, strict=True))))


@cache
def constraints(file: Path = PUBLISHED) -> tuple[Constraint, ...]:
    """The published list."""
    found = []
    for entry in tomllib.loads(file.read_text())["constraint"]:
        when = {n: (v,) if isinstance(v, str) else tuple(v) for n, v in entry["when"].items()}
        for name, among in when.items():
            if unknown := set(among) - set(VALUES[name]):
                raise ValueError(f"{file.name}: {name}: {', '.join(unknown)}")
        texts = {key: entry.get(key, "") for key in ("by", "reason", "says", "example")}
        found.append(Constraint(when, **texts))
    return tuple(found)


def against(case: Case | Mapping[str, str], gpu: bool = False) -> Constraint | None:
    """What keeps these values from meeting here; None: nothing does."""
    values = case.values() if isinstance(case, Case) else case
    return next((c for c in constraints() if c.holds(values) and not (gpu and c.by == "gpu")), None)


def on_gpu() -> list[Case]:
    """Cases in which what only a GPU computes meets every other value."""
    alone = {
        (*pair, other)
        for pair in ((("kind", "moe"), ("weights", "nvfp4")), (("kind", "moe"), ("weights", "bfloat16")))
        for name, values in VALUES.items()
        if name not in dict(pair)
        for other in ((name, value) for value in values)
    }
    pooled = {meeting for c in constraints() if c.by == "gpu" for meeting in _meetings(c)}
    wanted = {tuple(sorted(m, key=lambda part: list(VALUES).index(part[0]))) for m in alone | pooled}
    return drawn(3, possible(3, gpu=True) - wanted, gpu=True)[0]


def _meetings(constraint: Constraint) -> Iterator[Pair]:
    """Its values with every value of each other parameter."""
    for chosen in itertools.product(*constraint.when.values()):
        pair = tuple(zip(constraint.when, chosen, strict=True))
        for name, values in VALUES.items():
            if name not in constraint.when:
                yield from ((*pair, (name, value)) for value in values)


def drawn(n: int, met: Iterable[Pair] = (), gpu: bool = False, tries: int = 6) -> tuple[list[Case], set[Pair]]:
    """Cases in which every n values meet that can, and those values that no case can have.

    A case begins with values that have not met, and takes of each other parameter the value with which the most meet
    that have not; of several such cases the best is taken. (allpairspy 2.5.1 stops where its next value is not
    possible: with these constraints half of the triples never meet; covertable 3.2.0 draws cases that cannot be.)

    Args:
        met: values that have met in cases before.
        tries: cases of which the best is taken.
    """
    rng = random.Random(0)
    left = possible(n, gpu) - set(met)
    order = sorted(left)
    rng.shuffle(order)
    cases: list[Case] = []
    never: set[Pair] = set()
    for meeting in order:
        if meeting not in left:
            continue
        rows = [row for _ in range(tries) if (row := _row(dict(meeting), left, n, rng, gpu)) is not None]
        if not rows:
            never.add(meeting)
            left.discard(meeting)
            continue
        best = max((Case(**row) for row in rows), key=lambda case: len(left & set(case.meetings(n))))
        cases.append(best)
        left.difference_update(best.meetings(n))
    return cases, never


def _row(begun: dict[str, str], left: set[Pair], n: int, rng: random.Random, gpu: bool) -> dict[str, str] | None:
    """These values with one of each other parameter; None: there are none."""
    names = [name for name in VALUES if name not in begun]
    if not names:
        return begun
    name = rng.choice(names)
    others = list(itertools.combinations((k for k in VALUES if k in begun), n - 1))

    def new(value: str) -> float:
        row = begun | {name: value}
        keys = (sorted((*other, name), key=list(VALUES).index) for other in others)
        return sum(tuple((k, row[k]) for k in key) in left for key in keys) + rng.random() / 2

    for value in sorted(VALUES[name], key=new, reverse=True):
        row = begun | {name: value}
        if against(row, gpu) is None and (whole := _row(row, left, n, rng, gpu)) is not None:
            return whole
    return None


def possible(n: int, gpu: bool = False) -> set[Pair]:
    """Every n values that can meet, as far as what is said of these alone."""
    return {
        meeting
        for chosen in itertools.combinations(VALUES, n)
        for meeting in (tuple(zip(chosen, row, strict=True)) for row in itertools.product(*(VALUES[c] for c in chosen)))
        if against(dict(meeting), gpu) is None
    }


def named(message: str, case: Case) -> Constraint | None:
    """The constraint by which a case is refused with this message; None: none of the list says so."""
    values = case.values()
    for c in constraints():
        if c.by == "outcore" and c.holds(values) and re.search(c.says, message, re.DOTALL):
            return c
    return None
