"""``generate`` and ``stream_generate``: one sweep for the prompt however long, one or less a token, none more."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import GenerationResponse
from mlx_lm.generate import stream_generate as generate_resident
from mlx_lm.models.cache import RotatingKVCache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import UsageError
from ..model.cache_form import check_cache
from ..model.cache_rollback import snapshot_bytes
from ..options import whole as whole_number
from ..planning.draft_cost import MOST
from ..runtime.session import Session
from .generate_step import generate_step, responses
from .model_runner import MLX_LM_STEP, Target
from .prompt import cached_tokens, check_ids, check_prompt, encode, note_length
from .sampling import Draw, foresee
from .served import served
from .speculative.acceptance import Experience
from .speculative.draft_length import Control
from .speculative.drafting import Drafting, check_draft_length
from .speculative.speculate import Speculation
from .wired import generating


def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | mx.array | Sequence[int],
    max_tokens: int = 256,
    **kwargs: Any,
) -> Iterator[GenerationResponse]:
    """Generate text from a model loaded by ``outcore.load``; mlx-lm's function of that name, for streamed weights.

    Args:
        prompt: text, or token ids.
        max_tokens: -1 for as many as the context holds.
        kwargs: ``mlx_lm.generate.generate_step``'s: sampler, logits_processors, max_kv_size, prompt_cache,
            prefill_step_size, kv_bits, kv_group_size, quantized_kv_start, prompt_progress_callback, input_embeddings.
            And ``draft_model``, a model with the same tokenizer, in memory, in place of what drafts for this one; and
            ``num_draft_tokens``: at most so many tokens are drafted for a sweep; None: as many as are worth it.
            ``history``: the tokens that ``prompt_cache`` holds, which what is drafted may repeat.
            ``leave_last``: ``prompt_cache`` need not hold the answer's last token, for which a sweep is saved.

    What ``prompt_cache`` holds afterwards is what mlx-lm leaves there: the prompt and all tokens that were yielded,
    also where the generator was closed before its end. After an exception it holds a part of them, never anything
    else: nothing of this call if nothing was yielded, else at least all but the last token; ``model.outcore.in_cache``
    says how many.

    One thread at a time: where another one generates with this model, this waits until it has done.

    Yields:
        mlx-lm's ``GenerationResponse``. For a streamed model ``generation_tps`` counts the tokens after the first
        over the time since the first; mlx-lm counts one more.

    Raises:
        PromptError: an empty prompt, or one longer than the model or the planned context allows.
        UsageError: ``prompt_cache`` is of another model.
        BusyError: another thread began a text and neither goes on with it nor closes it.
    """
    session: Session | None = getattr(model, "outcore", None)
    if session is not None:
        # Here and not where the text begins: Python handles signals before a generator's first instruction.
        session.in_cache = 0
    return _encoded(model, session, tokenizer, prompt, max_tokens, kwargs)


def _encoded(
    model: nn.Module,
    session: Session | None,
    tokenizer: Any,
    prompt: str | mx.array | Sequence[int],
    max_tokens: int,
    kwargs: dict[str, Any],
) -> Iterator[GenerationResponse]:
    max_tokens = whole_number("max_tokens", max_tokens, -1, 2**63 - 1)
    if max_tokens == 0:
        raise UsageError("max_tokens=0: ask for at least one token, or -1 for no limit")
    tokenizer = tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)
    ids = encode(tokenizer, prompt)
    if session is None:
        check_prompt(ids.size if kwargs.get("input_embeddings") is None else 1, max_tokens, None)
        for name in ("history", "leave_last"):
            kwargs.pop(name, None)
        yield from generate_resident(model, tokenizer, ids, max_tokens=max_tokens, **kwargs)
        return
    yield from served(session.exclusive, _stream(model, session, tokenizer, ids, max_tokens, kwargs))


def _stream(
    model: nn.Module,
    session: Session,
    tokenizer: TokenizerWrapper,
    ids: mx.array,
    max_tokens: int,
    kwargs: dict[str, Any],
) -> Generator[GenerationResponse, None, None]:
    session.in_cache = 0
    session.bind_again()
    before: Sequence[int] = kwargs.pop("history", ())
    cache: list[Any] | None = kwargs.get("prompt_cache")
    embeddings = kwargs.get("input_embeddings")
    length = ids.size if embeddings is None else len(embeddings)
    check_cache(session.forms, cache)
    check_ids(ids, session, "the prompt")
    held = cached_tokens(cache or ())
    max_tokens = check_prompt(length, max_tokens, session, held, bounded=kwargs.get("max_kv_size") is None)
    note_length(held + length, session, "the prompt")
    own_step = kwargs.get("prefill_step_size") or session.prefill_step_size or MLX_LM_STEP
    kept = 0 if cache is None else max(snapshot_bytes(cache), session.size.states)
    if any(isinstance(c, RotatingKVCache) and c.keep for c in cache or ()) or kwargs.get("max_kv_size"):
        # What a token sees of such a window depends on the chunk that it is computed in: mlx-lm's, however little
        # memory there is.
        kwargs["prefill_step_size"] = own_step
    step = kwargs.get("prefill_step_size")
    kwargs["prefill_step_size"] = _make_room(session, held + length + 1, length, step, kept=kept)
    drafting, most = _drafting(session, kwargs)
    with generating(model):
        if session.streaming is None and drafting is None and cache is None and kwargs.get("kv_bits") is None:
            kwargs.pop("leave_last", None)
            for n, response in enumerate(generate_resident(model, tokenizer, ids, max_tokens=max_tokens, **kwargs), 1):
                yield response
                # Mlx-lm computes one token ahead.
                _before_sweep(session, held + length + n + 2)
            return
        text = _Text(session, held, drafting, most, before, kwargs.get("sampler"), tokenizer.eos_token_ids)
        tokens = generate_step(
            ids,
            model,
            lambda: session.streaming,
            max_tokens=max_tokens,
            quantize_step=own_step,
            reserve=text.reserve,
            speculation=text.speculation,
            counted=text.count,
            **kwargs,
        )
        yield from responses(tokens, tokenizer, ids.size, max_tokens)


@dataclass
class _Text:
    """What a session has to do with one text.

    Attributes:
        held: tokens that a cache held before the prompt; ``before``: which, as far as they are known.
        most: drafted tokens for a sweep at most.
        control: of this text's drafts; None: there are none yet.
    """

    session: Session
    held: int
    drafting: Drafting | None
    most: int
    before: Sequence[int]
    sampler: Draw | None
    ends: Collection[int]
    control: Control | None = None

    def reserve(self, tokens: int) -> None:
        """Room for so many tokens, before a sweep."""
        _before_sweep(self.session, self.held + tokens)
        if self.session.streaming is not None and self.control is not None:
            self.control.most = min(self.control.most, self.session.size.drafted)

    def speculation(self, target: Target, logprobs: mx.array) -> Speculation | None:
        """How tokens are drafted, if they are."""
        session = self.session
        if self.drafting is None or self.most == 0:
            return None
        if session.experience is None:
            session.experience = Experience()
        self.control = Control(self.most, session.experience)
        self.control.foreseen_s = target.prompt_s
        how = foresee(self.sampler, logprobs.dtype)
        source = self.drafting.source(self.control, how, logprobs.size, target.state)
        # Where nothing is streamed, what the budget leaves over is the allocator's.
        room = session.plan.budget_bytes - session.plan.peak_bytes if session.plan.streams else 0
        return Speculation(source, self.control, session.metrics, self.ends, self.before, max(0, room))

    def count(self, tokens: int) -> None:
        """So many tokens of it went into the cache."""
        self.session.in_cache = tokens


def generate(
    model: nn.Module, tokenizer: Any, prompt: str | mx.array | Sequence[int], verbose: bool = False, **kwargs: Any
) -> str:
    """The whole answer as one string; arguments as in ``stream_generate``. ``verbose`` prints it as it is made, and how
    fast that was, as mlx-lm's function of that name."""
    text, response = "", None
    if verbose:
        print("=" * 10)
    for response in stream_generate(model, tokenizer, prompt, **kwargs):
        text += response.text
        if verbose:
            print(response.text, end="", flush=True)
    if not verbose:
        return text
    print()
    print("=" * 10)
    if response is None or not text:
        print("No text generated for this prompt")
        return text
    print(f"Prompt: {response.prompt_tokens} tokens, {response.prompt_tps:.3f} tokens-per-sec")
    print(f"Generation: {response.generation_tokens} tokens, {response.generation_tps:.3f} tokens-per-sec")
    print(f"Peak memory: {response.peak_memory:.3f} GB")
    return text


def _drafting(session: Session, kwargs: dict[str, Any]) -> tuple[Drafting | None, int]:
    """What drafts, taken from the arguments or as the model was loaded, and how many tokens for a sweep at most."""
    model, asked = kwargs.pop("draft_model", None), kwargs.pop("num_draft_tokens", None)
    drafting = cast(Drafting | None, session.drafting) if model is None else Drafting("model", "draft_model", model)
    most = MOST if session.streaming is None else session.size.drafted
    return drafting, most if asked is None else min(check_draft_length(asked), most or asked)


def _make_room(session: Session, tokens: int, prompt: int = 1, step: int | None = None, kept: int = 0) -> int:
    """Room for a context of that many tokens, a prompt, and bytes of caches to go back to. Returns tokens of the prompt
    to compute at a time."""
    if session.residency is None or session.closed:  # what it holds then stays as it is
        return step or session.plan.prefill_step
    return session.residency.reserve(tokens, prompt, step, kept)


def _before_sweep(session: Session, tokens: int) -> None:
    """Room for a context of that many tokens; where nothing is streamed, a look at memory too, which a streamed model
    takes by itself."""
    _make_room(session, tokens)
    session.before_pass()
