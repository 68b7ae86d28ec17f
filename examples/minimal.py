"""The inner core by itself: a model folder is opened, planned for within a budget, streamed, and asked for tokens.

python examples/minimal.py FOLDER BYTES TEXT
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_tokenizer

from outcore.checkpoint.checkpoint import open_checkpoint
from outcore.checkpoint.lazy_model import open_lazily
from outcore.engine.binding import ReadSettings
from outcore.engine.engine import Engine
from outcore.engine.model_profile import profile_of
from outcore.plan.planner import make_plan, smallest_budget


def load(folder: Path, budget: int, context: int = 512) -> Engine:
    """The model of a folder, within so many bytes; ``load(...).model`` works in mlx-lm's functions unchanged."""
    profile = profile_of(open_lazily(open_checkpoint(folder)), context=context, prompt=context)
    return Engine(make_plan(profile.size, budget), profile, ReadSettings())


def smallest(folder: Path, context: int = 512) -> int:
    """Bytes of the smallest budget that works."""
    lazy = open_lazily(open_checkpoint(folder))
    return smallest_budget(profile_of(lazy, context=context, prompt=context).size)


def tokens(engine: Engine, prompt: list[int], count: int) -> Iterator[int]:
    """The likeliest tokens after a prompt, as mlx-lm computes them: all of it but the last token first."""
    cache, token = make_prompt_cache(engine.model), mx.array(prompt[-1:])
    if len(prompt) > 1:
        engine.model(mx.array([prompt[:-1]]), cache=cache)
    for _ in range(count):
        token = mx.argmax(engine.model(token[None], cache=cache)[0, -1:], axis=-1)
        yield int(token.item())


if __name__ == "__main__":
    tokenizer, engine = load_tokenizer(Path(sys.argv[1])), load(Path(sys.argv[1]), int(sys.argv[2]))
    print(tokenizer.decode(list(tokens(engine, tokenizer.encode(sys.argv[3]), 50))))
    engine.close()
