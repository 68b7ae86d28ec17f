"""Throw-away: would a tree of guesses give more tokens a sweep than a chain of as many?

    python benchmarks/experiments/11_trees.py MODEL --code FILE --prose FILE --draft self:2

At places of the model's own greedy text the draft goes on from the model's caches, is handed the text's next tokens one
after the other, and the rank and probability of each is noted: along the path that is accepted that is all that a tree
or a chain sees. A chain of N is right as long as ranks are 0. A fixed tree of N nodes, each a path of ranks, is put
together by how often paths occur at half of the places, and counted at the others. ``dynamic`` is a bound: nodes whose
product of probabilities is above a threshold, of which only those beside the accepted path are counted, so that a real
tree of that size has less.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

import outcore

sys.path.insert(0, str(Path(__file__).parents[1]))
from speculation import PROMPT, prompts_of

DEPTH, BRANCHES, EVERY = 32, 4, 6
Place = tuple[list[int], np.ndarray[Any, Any], np.ndarray[Any, Any]]
"""Ranks of the next tokens, their probabilities, and the first ``BRANCHES`` probabilities at each."""


def places(model: Any, draft: Any, tokenizer: Any, prompt: list[int], tokens: int) -> list[Place]:
    """What the draft thinks of the model's greedy text, from every few of its tokens on."""
    found: list[Place] = []
    made = [r.token for r in outcore.stream_generate(model, tokenizer, prompt, max_tokens=tokens)]
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array(prompt[:-1])[None], cache=cache))
    text, held = [prompt[-1], *made], 0
    for at in range(0, len(made) - DEPTH + 1, EVERY):
        if at > held:
            mx.eval(model(mx.array(text[held:at])[None], cache=cache))
            held = at
        logits = draft(mx.array(text[at : at + DEPTH])[None], cache=copy.deepcopy(cache))[0].astype(mx.float32)
        chances = mx.softmax(logits, axis=-1)
        true = mx.array(text[at + 1 : at + DEPTH + 1])[:, None]
        own = mx.take_along_axis(chances, true, axis=-1)
        ranks = (chances > own).sum(axis=-1)
        best = mx.sort(chances, axis=-1)[:, -BRANCHES:][:, ::-1]
        mx.eval(ranks, own, best)
        found.append((np.array(ranks).tolist(), np.array(own[:, 0]), np.array(best)))
    return found


def chain(found: list[Place], nodes: int) -> float:
    """Tokens a sweep."""
    return float(np.mean([1 + next((i for i, r in enumerate(p[0][:nodes]) if r), nodes) for p in found]))


def fixed(train: list[Place], test: list[Place], nodes: int) -> float:
    """Tokens a sweep of the best tree by how often paths of ranks occur."""
    count = Counter(tuple(p[0][: d + 1]) for p in train for d in range(nodes))
    paths = [path for path, _ in count.most_common() if max(path) < BRANCHES]
    # A path is never more frequent than its beginning, so a tree's nodes come in an order that can be built.
    tree = set(sorted(paths, key=lambda path: (-count[path], len(path)))[:nodes])
    return float(np.mean([1 + sum(tuple(p[0][: d + 1]) in tree for d in range(DEPTH)) for p in test]))


def dynamic(found: list[Place], nodes: int) -> float:
    """Tokens a sweep, at most, of a tree by the draft's own probabilities."""
    total = 0.0
    for ranks, own, best in found:
        reach = np.concatenate([[1.0], np.cumprod(own)])  # of the true path's nodes
        beside = sorted((reach[d] * best[d, b] for d in range(DEPTH) for b in range(BRANCHES)), reverse=True)
        least = beside[nodes - 1]
        inside = [r < BRANCHES and c >= least for r, c in zip(ranks, reach[1:], strict=True)]
        total += 1 + next((i for i, ok in enumerate(inside) if not ok), DEPTH)
    return total / len(found)


def main() -> int:
    parser = argparse.ArgumentParser(description="Trees of guesses against chains.")
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--code", type=Path, required=True)
    parser.add_argument("--prose", type=Path, required=True)
    parser.add_argument("--draft", default="self:2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    args = parser.parse_args()
    model, tokenizer = outcore.load(
        args.model, resident=0, dtype=args.dtype, draft=args.draft, context=PROMPT + args.tokens, govern=False
    )
    # Of layers that stay in memory a nested draft has all bits: none does.
    with model.outcore as session:
        for name, file in (("code", args.code), ("prose", args.prose)):
            prompts = prompts_of(tokenizer, file.read_text(), args.prompts, name == "code")
            each = [places(model, session.drafting.model, tokenizer, p, args.tokens) for p in prompts]
            found = [place for part in each for place in part]
            random.Random(0).shuffle(each)
            halves = [[p for part in each[n::2] for p in part] for n in (0, 1)]
            right = np.mean([p[0][0] == 0 for p in found])
            print(f"{name}: {len(found)} places, first guess right {right:.3f}")
            for nodes in (8, 16, 32):
                tree = np.mean([fixed(halves[0], halves[1], nodes), fixed(halves[1], halves[0], nodes)])
                own = fixed(found, found, nodes)
                print(
                    f"  {nodes} nodes: chain {chain(found, nodes):.2f}, fixed tree {tree:.2f} (on its own places "
                    f"{own:.2f}), dynamic at most {dynamic(found, nodes):.2f}"
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
