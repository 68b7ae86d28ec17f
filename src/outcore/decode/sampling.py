"""Samplers like mlx-lm's, and the rejection rule for drafted tokens.

A guess from the text's own repetitions is accepted if the sampler draws the same token; so is the likeliest token of a
draft model. A token that a draft model draws from its probabilities is accepted by the rejection rule (Leviathan et al.
2023, https://arxiv.org/abs/2211.17192; Chen et al. 2023, https://arxiv.org/abs/2302.01318): a token drafted from q
stays with probability min(1, p / q), and the first one that does not is replaced by one drawn from max(0, p - q). The
result is distributed as p, and no rule accepts more. But how many random numbers a draft takes depends on its length,
and so on timing: the same seed may give different texts. With a ``coupled`` sampler, a draft takes no random numbers,
and each token is drawn with the same ones as without a draft. So a seed fixes the text, but fewer drafted tokens are
accepted.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

import mlx.core as mx
from mlx_lm import sample_utils

from ..checks import COUNT, LEAST_TEMPERATURE, real, whole
from ..errors import UsageError

# mlx-lm's sampler: takes log-probabilities of shape (rows, vocabulary), returns tokens of shape (rows,).
Draw = Callable[[mx.array], mx.array]

# mlx-lm's logits processor: takes all tokens so far and logits (1, vocabulary), returns logits.
Processor = Callable[[mx.array, mx.array], mx.array]


@dataclass(frozen=True)
class MlxLmSampler:
    """mlx-lm's sampler of the same arguments; draws the same tokens from the same random state.

    Args:
        temp: temperature; 0 takes the most likely token.
        top_p, min_p, min_tokens_to_keep, top_k, xtc_probability, xtc_threshold, xtc_special_tokens: as in
            ``mlx_lm.sample_utils.make_sampler``.
        coupled: each token is drawn with the random numbers that it has without drafts, so that a seed fixes the text.
    """

    temp: float = 0.0
    top_p: float = 0.0
    min_p: float = 0.0
    min_tokens_to_keep: int = 1
    top_k: int = 0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_special_tokens: Sequence[int] | None = None
    coupled: bool = False
    _draw: Draw = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in SAMPLING}
        check_sampling(**given, flags=False)
        object.__setattr__(
            self, "_draw", sample_utils.make_sampler(**given, xtc_special_tokens=list(self.xtc_special_tokens or ()))
        )

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Returns tokens of shape (rows,), drawn from log-probabilities of shape (rows, vocabulary)."""
        return self._draw(logprobs)

    def distribution(self, logprobs: mx.array) -> mx.array:
        """Returns the probabilities, float32 (rows, vocabulary), of a draw; for temperatures above 0."""
        if 0 < self.top_p < 1.0:
            logprobs = sample_utils.apply_top_p(logprobs, self.top_p)
        if self.min_p != 0.0:
            logprobs = sample_utils.apply_min_p(logprobs, self.min_p, self.min_tokens_to_keep)
        if self.xtc_probability > 0.0:
            special = list(self.xtc_special_tokens or ())
            logprobs = sample_utils.apply_xtc(logprobs, self.xtc_probability, self.xtc_threshold, special)
        if 0 < self.top_k < logprobs.shape[-1]:
            logprobs = sample_utils.apply_top_k(logprobs, self.top_k)
        return mx.softmax(logprobs.astype(mx.float32) / self.temp, axis=-1)


# mlx-lm's function of that name, with its arguments in the same order.
make_sampler = MlxLmSampler

# Arguments that are shares, and their maxima.
SHARES = {"top_p": 1.0, "min_p": 1.0, "xtc_probability": 1.0, "xtc_threshold": 0.5}

# What flags may set.
SAMPLING = [f.name for f in fields(MlxLmSampler) if f.init and f.name not in ("xtc_special_tokens", "coupled")]


def check_sampling(*, vocabulary: int | None = None, flags: bool = True, **given: float) -> None:
    """Refuses values that mlx-lm's samplers refuse only at the first token, or draw nonsense from.

    Args:
        vocabulary: number of tokens, if known.
        flags: errors name flags (``--top-p``); otherwise arguments (``top_p``).
        given: values of some of the arguments ``SAMPLING``.

    Raises:
        UsageError: a value is out of range.
    """
    names = {argument: f"--{argument.replace('_', '-')}" if flags else argument for argument in SAMPLING}
    if real(names["temp"], given.get("temp", 0.0), 0.0) and given["temp"] < LEAST_TEMPERATURE:
        raise UsageError(f"{names['temp']} {given['temp']}: 0, or at least {LEAST_TEMPERATURE:g}")
    for argument in [each for each in given if each not in ("temp", "min_tokens_to_keep", "top_k")]:
        real(names[argument], given[argument], 0.0, SHARES[argument])
    tokens = COUNT if vocabulary is None else vocabulary
    whole(names["min_tokens_to_keep"], given.get("min_tokens_to_keep", 1), most=tokens)
    # Below 1 is off, as in mlx-lm.
    if whole(names["top_k"], given.get("top_k", 0), -COUNT, COUNT) >= tokens:
        raise UsageError(
            f"{names['top_k']} {given['top_k']}: fewer than the {tokens} tokens of this model, or 0 for all"
        )


class OwnSampler:
    """A sampler with random numbers of its own, so that its tokens do not depend on other sequences or on tokens
    computed ahead. Its temperature is above 0; ``seed`` None: a random one."""

    # The most draws that ``rewind`` can take back.
    REMEMBERED = 8

    def __init__(self, sampler: MlxLmSampler, seed: int | None = None) -> None:
        self.drawn = 0
        self._sampler, self._seed = sampler, seed
        self._keys: deque[mx.array] = deque(maxlen=self.REMEMBERED + 1)

    def __call__(self, logprobs: mx.array) -> mx.array:
        if not self._keys:  # made at the first draw, so that a waiting sequence takes no memory
            self._keys.append(mx.random.key(secrets.randbits(63) if self._seed is None else self._seed % 2**63))
        kept = self._sampler
        following, own = mx.random.split(self._keys[-1])
        self._keys.append(following)
        self.drawn += 1
        if 0 < kept.xtc_probability < 1:
            # mlx-lm's ``apply_xtc`` draws from the global random state.
            own, chance = mx.random.split(own)
            without, with_xtc = (replace(kept, xtc_probability=p).distribution(logprobs) for p in (0.0, 1.0))
            p = mx.where(mx.random.uniform(key=chance) > kept.xtc_probability, without, with_xtc)
        else:
            p = kept.distribution(logprobs)
        return mx.random.categorical(mx.log(p), key=own)

    def narrow(self, text: mx.array, logits: mx.array) -> mx.array:
        """A logits processor: the logarithms of the probabilities that tokens are drawn from, if there is no XTC."""
        return mx.log(self._sampler.distribution(logits - mx.logsumexp(logits, axis=-1, keepdims=True)))

    def rewind(self, drawn: int) -> None:
        """Returns to the random state after ``drawn`` draws, so that tokens that the caller did not get are redrawn."""
        while self.drawn > drawn:
            self._keys.pop()
            self.drawn -= 1


def own_sampler(temperature: float, *, seed: int | None = None, **options: Any) -> OwnSampler | None:
    """Returns a sampler with random numbers of its own; None for temperature 0. ``options`` are ``MlxLmSampler``'s."""
    return None if temperature == 0 else OwnSampler(MlxLmSampler(temperature, **options), seed)


def drawn_by(sampler: Draw | None) -> MlxLmSampler | None:
    """Returns the sampler whose distribution drafted tokens are drawn from. None: the likeliest token is drafted, since
    the sampler is greedy, unknown or ``coupled``."""
    return sampler if isinstance(sampler, MlxLmSampler) and sampler.temp > 0 and not sampler.coupled else None


def judge(token: int, p: mx.array, q: mx.array) -> int:
    """Applies the rejection rule to a token drafted from probabilities ``q``, where the model has ``p`` (vocabulary,).
    Returns the token if it is accepted, otherwise another one."""
    stays = mx.minimum(p[token] / mx.maximum(q[token], 1e-30), 1.0)
    draw, other = mx.random.uniform(), mx.random.categorical(mx.log(mx.maximum(p - q, 0.0)))
    mx.eval(stays, draw, other)
    return token if bool(draw < stays) else cast(int, other.item())
