"""Turns texts into tokens as mlx-vlm's server does, and groups them into passes. Makes no MLX arrays, so any thread may
run it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outcore.checkpoint.positions import config_of
from outcore.checkpoint.tokenizer import load_tokenizer
from outcore.errors import UnsupportedModelError
from outcore.modules.mlx_lm_tokenizer import inner_tokenizer

from .kinds import CLASSIFIERS, DENSE, EMBED, RERANK, kind_of

# mlx-vlm's limit of a text, in tokens, and the one of tokenizers that name none.
MOST, UNNAMED = 8192, 512

# What mlx-vlm asks a language model that rates documents.
INSTRUCTION = "Given a search query, retrieve relevant candidates that answer the query."
SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".'
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@dataclass(frozen=True)
class Encoded:
    """A text as tokens. ``types``: which of two texts each is of; None: the model does not ask. ``cut``: it was too
    long, and its end is left out."""

    ids: Sequence[int]
    types: Sequence[int] | None = None
    cut: bool = False


class TextReader:
    """A model's tokenizer. One thread at a time may use it.

    Args:
        task: what the model is for (``kinds``).

    Attributes:
        limit: the most tokens of a text; a longer one is cut.
        pad, left: the token that fills shorter texts of a pass up, and whether it does so in front.
        filled: whether shorter texts may be filled up: lfm2_colbert's vectors depend on that, in mlx-vlm too.
    """

    def __init__(self, folder: Path, task: str = EMBED, *, trust_remote_code: bool = False) -> None:
        config = config_of(folder)
        self.kind, self.task = kind_of(config, task) or "", task
        wrapped = load_tokenizer(folder, {"trust_remote_code": True} if trust_remote_code else {})
        self._tokenizer: Any = inner_tokenizer(wrapped)
        pad = next((t for t in (self._tokenizer.pad_token_id, self._tokenizer.eos_token_id) if t is not None), 0)
        self.pad, self.left = int(pad), getattr(self._tokenizer, "padding_side", "right") == "left"
        self.filled = not (self.kind == "lfm2_embedding" and (folder / DENSE).is_file())
        # Some models have no embeddings of token types, though their tokenizers give them.
        self._typed = int(config.get("type_vocab_size") or (1 if self.kind == "xlm_roberta" else 2)) > 1
        judges = task == RERANK and self.kind not in CLASSIFIERS
        self.left |= judges
        named = getattr(self._tokenizer, "model_max_length", None)
        positions = config.get("max_position_embeddings")
        if isinstance(positions, int) and self.kind == "xlm_roberta":
            positions -= 1 + int(config.get("pad_token_id") or 0)  # the first position is behind the padding's
        self.limit = min(n for n in (MOST, named or UNNAMED, positions or MOST) if isinstance(n, int) and n > 0)
        self._suffix: list[int] = self._tokenizer.encode(SUFFIX, add_special_tokens=False) if judges else []

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        return self._encoded(list(texts))

    def pairs(self, query: str, documents: Sequence[str], instruction: str | None = None) -> list[Encoded]:
        """Returns a query with each document, as a reranker takes them."""
        if not self._suffix:
            if instruction is not None:
                raise UnsupportedModelError("an instruction is for rerankers that are language models; leave it out")
            return self._encoded([query] * len(documents), list(documents))
        return [self._judged(query, document, instruction or INSTRUCTION) for document in documents]

    @property
    def answers(self) -> tuple[int, int]:
        """The tokens of yes and no, between which a language model that rates decides."""
        yes, no = (self._tokenizer.convert_tokens_to_ids(word) for word in ("yes", "no"))
        if yes is None or no is None or yes == no:
            raise UnsupportedModelError("this model cannot rate documents: its tokenizer lacks the tokens yes and no")
        return int(yes), int(no)

    def _judged(self, query: str, document: str, instruction: str) -> Encoded:
        asked = f"<Instruct>: {instruction}\n\n<Query>: {query}\n\n<Document>: {document}"
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": asked}]
        how = {"tokenize": True, "add_generation_prompt": False, "enable_thinking": False}
        found = self._tokenizer.apply_chat_template(messages, **how)
        ids = list(getattr(found, "input_ids", found))
        most = MOST - len(self._suffix)
        return Encoded(array("i", ids[:most] + self._suffix), cut=len(ids) > most)

    def _encoded(self, *texts: list[str]) -> list[Encoded]:
        if not texts[0]:
            return []
        # Cut by the tokenizer, which keeps the tokens that end a text; a text as long as the limit may have been cut.
        found = self._tokenizer(*texts, truncation=True, max_length=self.limit)
        types = (self._typed and found.get("token_type_ids")) or [None] * len(found["input_ids"])
        full = [n for n, ids in enumerate(found["input_ids"]) if len(ids) >= self.limit]
        whole = self._tokenizer(*([given[n] for n in full] for given in texts))["input_ids"] if full else []
        cut = {n for n, ids in zip(full, whole, strict=True) if len(ids) > self.limit}
        return [
            Encoded(array("i", ids), None if kinds is None or not any(kinds) else array("i", kinds), n in cut)
            for n, (ids, kinds) in enumerate(zip(found["input_ids"], types, strict=True))
        ]


def passes_of(lengths: Sequence[int], tokens: int, *, filled: bool = True) -> list[list[int]]:
    """Groups texts of like length into passes: the numbers of the texts of each, shortest first.

    Args:
        tokens: the most tokens of a pass, those that fill shorter texts up included; a longer text is alone.
        filled: texts of different lengths may share a pass.
    """
    found: list[list[int]] = []
    for n in sorted(range(len(lengths)), key=lambda n: lengths[n]):
        alike = filled or not found or lengths[found[-1][0]] == lengths[n]
        if not found or not alike or (len(found[-1]) + 1) * lengths[n] > tokens:
            found.append([])
        found[-1].append(n)
    return found


def readings_of(texts: Iterable[Encoded], tokens: int) -> Iterator[list[Encoded]]:
    """Cuts a sequence of texts into those that share a reading of the weights, of about ``tokens`` tokens."""
    some, held = list[Encoded](), 0
    for text in texts:
        if some and held + len(text.ids) > tokens:
            yield some
            some, held = [], 0
        some.append(text)
        held += len(text.ids)
    if some:
        yield some
