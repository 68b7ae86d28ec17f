"""What mlx-lm says, everything resident: the tokens of a text, or the probabilities that each token was drawn with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.generate import stream_generate as their_stream_generate
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from mlx_lm.utils import load as their_load

SEED = 7
TEMPERATURE, TOP_K = 0.7, 4
"""Of whoever draws: few enough tokens that a wrong one is soon seen."""
PENALTY: dict[str, Any] = {"repetition_penalty": 1.5, "repetition_context_size": 20}


@dataclass(frozen=True)
class Text:
    """A prompt and the tokens that its answer has; ``in_cache``: one of a conversation, behind the text before it."""

    prompt: tuple[int, ...]
    tokens: int
    in_cache: bool = False


@dataclass(frozen=True)
class How:
    """What a text is computed with, but for the model.

    Attributes:
        settings: ``kv_bits`` and its like, and ``max_kv_size``.
        step: tokens of a chunk of a prompt.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    step: int = 16
    sampling: str = "greedy"

    def drawing(self, make: Callable[..., Any] = make_sampler) -> dict[str, Any]:
        """Arguments of ``stream_generate`` that say how tokens are drawn."""
        if self.sampling == "processors":
            return {"logits_processors": make_logits_processors(**PENALTY)}
        if self.sampling == "greedy":
            return {}
        return {"sampler": make(temp=TEMPERATURE, top_k=TOP_K)}


class Reference:
    """mlx-lm's own model of a case, loaded behind a seed.

    Args:
        cast: what it is computed in, where that is not what the checkpoint says.
    """

    def __init__(self, folder: Path, adapter: Path | None, cast: str | None = None) -> None:
        mx.random.seed(SEED)
        self.model, self.tokenizer = their_load(str(folder), adapter_path=None if adapter is None else str(adapter))[:2]
        if hasattr(self.model, "outcore"):
            raise RuntimeError("mlx-lm is patched: this is no reference")
        if cast is not None:
            self.model.set_dtype(getattr(mx, cast))

    def answers(self, texts: Sequence[Text], how: How) -> list[list[int]]:
        """The texts' answers, one after the other."""
        cache = make_prompt_cache(self.model, how.settings.get("max_kv_size"))
        found = []
        for text in texts:
            given: dict[str, Any] = {"prefill_step_size": how.step} | how.settings | how.drawing()
            if text.in_cache:
                given["prompt_cache"] = cache
            made = their_stream_generate(self.model, self.tokenizer, list(text.prompt), max_tokens=text.tokens, **given)
            found.append([r.token for r in made])
        return found

    def probabilities(self, texts: Sequence[Text], answers: Sequence[Sequence[int]], how: How) -> list[list[Any]]:
        """For each token of each answer the log-probabilities, (vocabulary,), that mlx-lm would have drawn it from:
        the prompt in chunks, its last token alone, and token by token."""
        kept = make_prompt_cache(self.model, how.settings.get("max_kv_size"))
        found = []
        for text, answer in zip(texts, answers, strict=True):
            cache = kept if text.in_cache else make_prompt_cache(self.model, how.settings.get("max_kv_size"))
            prompt, at, rows = list(text.prompt), 0, []
            while (n := min(how.step, len(prompt) - 1 - at)) > 0:
                self._pass(prompt[at : at + n], cache, how)
                at += n
            for last in [prompt[-1], *answer]:
                logits = self._pass([last], cache, how)
                rows.append(np.array((logits - mx.logsumexp(logits, keepdims=True)).astype(mx.float32))[0])
            found.append(rows[: len(answer)])
        return found

    def _pass(self, tokens: Sequence[int], cache: list[Any], how: How) -> mx.array:
        logits = self.model(mx.array([list(tokens)]), cache=cache)[:, -1, :]
        bits = how.settings.get("kv_bits")
        if bits is not None:
            s = how.settings
            maybe_quantize_kv_cache(cache, s["quantized_kv_start"], s["kv_group_size"], bits)
        mx.eval(logits)
        return logits


BINS = 9


def unlikely(rows: Sequence[tuple[int, Any]], rounding: float) -> str | None:
    """Whether tokens were not drawn from the distributions that they should have been; None: they may well have been.

    Each token's place in its distribution, likeliest first and at random within its own share, is uniform if it was
    drawn from it; chi-square over bins says how likely what was found is. A token that cannot be drawn at all is
    said at once.

    Args:
        rows: tokens, and the log-probabilities that they were to be drawn from at ``TEMPERATURE`` from ``TOP_K``.
        rounding: nats by which log-probabilities may be off.
    """
    rng = np.random.default_rng(1)
    counts = np.zeros(BINS)
    for token, logprobs in rows:
        order = np.argsort(-logprobs, kind="stable")
        kept = order[:TOP_K]
        floor = logprobs[kept[-1]] - rounding  # those that are as likely as the last, but for rounding
        if logprobs[token] < floor:
            rank, gap = int(np.where(order == token)[0][0]), logprobs[kept[-1]] - logprobs[token]
            return (
                f"token {token}, the {rank + 1}th likeliest, was drawn where {TOP_K} are to choose from; it is "
                f"{gap:.3g} nats below the last of them"
            )
        scaled = np.exp((logprobs[kept] - logprobs[kept].max()) / TEMPERATURE)
        share = scaled / scaled.sum()
        at = np.where(kept == token)[0]
        place = int(at[0]) if at.size else TOP_K - 1
        u = share[:place].sum() + rng.random() * share[place]
        counts[min(int(u * BINS), BINS - 1)] += 1
    expected = counts.sum() / BINS
    statistic = float(((counts - expected) ** 2 / expected).sum())
    # Chi-square with 8 degrees of freedom.
    chance = math.exp(-statistic / 2) * sum((statistic / 2) ** k / math.factorial(k) for k in range((BINS - 1) // 2))
    if chance < 1e-6:
        return f"{int(counts.sum())} tokens drawn as {counts.astype(int).tolist()} where alike is right: p={chance:.1e}"
    return None
