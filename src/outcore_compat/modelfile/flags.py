"""What ``--modelfile`` says, as flags that were not given, and as what no flag says. Light: no MLX until it is used."""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from outcore.cli.parser import ArgumentParser
from outcore.errors import BudgetError, OutcoreError, UsageError
from outcore.machine.settings import Setting
from outcore.text import counted

from .options import Modelfile, read_modelfile
from .template import GoTemplate

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

FLAGS = {
    "model": "model",
    "adapter": "adapter_path",
    "draft": "draft",
    "system": "system_prompt",
    "num_ctx": "context",
    "num_predict": "max_tokens",
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": "seed",
    "draft_num_predict": "num_draft_tokens",
    "memory": "memory",
    "slots": "slots",
    "io": "io",
}
"""What a Modelfile may say, and the flag that says the same."""


def settle(parser: ArgumentParser, args: argparse.Namespace) -> dict[str, Setting]:
    """Fill in what a Modelfile says and no flag; ``args.modelfile`` becomes what was read.

    Returns:
        What was filled in, by its name in ``args``, and where it was said.

    Raises:
        UsageError: the file cannot be used; says which line and why.
    """
    if getattr(args, "modelfile", None) is None:
        return {}
    said = args.modelfile = read_modelfile(args.modelfile)
    given = parser.given(args.argv)
    filled: dict[str, Setting] = {}

    def fill(attribute: str, name: str, value: Any) -> None:
        if name not in given and hasattr(args, name):
            setattr(args, name, value)
            filled[name] = Setting(str(getattr(said, attribute)), said.line(attribute))

    several = parser.prog == "outcore serve"
    if several and given & {"models_named", "models_folder"}:
        given |= {"model"}
    for attribute, name in FLAGS.items():
        value: Any = getattr(said, attribute)
        if value is None:
            continue
        if attribute == "draft_num_predict" and value == 0:
            if not given & {"draft", "num_draft_tokens"}:
                fill(attribute, "draft", "none")
        elif attribute == "seed" and value < 0:
            fill(attribute, name, secrets.randbits(32))
        elif several and attribute == "model":
            fill(attribute, name, [value])
        else:
            fill(attribute, name, value)
    return filled


@contextmanager
def named(filled: Mapping[str, Setting]) -> Iterator[None]:
    """An error that names a flag which a Modelfile filled in, or its model, says so."""
    try:
        yield
    except OutcoreError as e:
        text = str(e)
        for name, found in filled.items():
            flag = "--" + name.replace("_", "-")
            told = name == "memory" and isinstance(e, BudgetError)  # by whoever names budgets
            if not told and (f"{flag} " in text or (name == "model" and found.value in text)):
                text += f"; {flag if name != 'model' else 'FROM'} is {found.source}"
        if text != str(e):
            e.args = (text, *e.args[1:])
        raise


def use_template(modelfile: Modelfile | None, tokenizer: TokenizerWrapper) -> None:
    """Have the tokenizer render messages by a Modelfile's ``TEMPLATE``, if it has one.

    Raises:
        UsageError: it has none, and neither has the model, but messages that only a template could render.
    """
    if modelfile is None:
        return
    if modelfile.template is not None:
        from outcore.modules.mlx_lm_compat import set_chat_template

        set_chat_template(tokenizer, template_text(modelfile.template, tokenizer))
    elif not tokenizer.has_chat_template:
        for attribute in ("system", "messages"):
            if attribute in modelfile.lines:
                raise UsageError(
                    f"{modelfile.line(attribute)}: this model has no chat template, and the Modelfile no TEMPLATE; "
                    "add one"
                )


def template_text(template: GoTemplate, tokenizer: TokenizerWrapper) -> str:
    """A Modelfile's template for this tokenizer: Ollama lets it put its first token in front of every text."""
    begins = tokenizer.bos_token_id is not None and list(tokenizer.encode("a"))[:1] == [tokenizer.bos_token_id]
    return template.jinja(str(tokenizer.bos_token) if begins else "")


def warn_of_bits(modelfile: Modelfile | None, config: Mapping[str, Any]) -> str | None:
    """What ``FLASH_QUANT_WARN_BELOW`` has to say of a model's config.json."""
    if modelfile is None or not modelfile.warn_below_bits:
        return None
    found = config.get("quantization") or config.get("quantization_config")
    groups = [found, *found.values()] if isinstance(found, dict) else []
    bits = [g["bits"] for g in groups if isinstance(g, dict) and isinstance(g.get("bits"), int)]
    if not bits or min(bits) >= modelfile.warn_below_bits:
        return None
    return (
        f"{modelfile.line('warn_below_bits')}: this model has weights of {counted(min(bits), 'bit')}, fewer than "
        f"{modelfile.warn_below_bits}: its answers may be worse"
    )


def answer_tokens(modelfile: Modelfile | None, prompt: int, max_tokens: int) -> int:
    """Tokens of an answer at most, -1 for no limit, by ``num_ctx`` too.

    Args:
        prompt: tokens before it.

    Raises:
        UsageError: they leave none.
    """
    if modelfile is None or modelfile.num_ctx is None:
        return max_tokens
    room = modelfile.num_ctx - prompt
    if room < 1:
        raise UsageError(
            f"{modelfile.line('num_ctx')}: num_ctx {modelfile.num_ctx} leaves no room for an answer to a prompt of "
            f"{counted(prompt, 'token')}; give more, or a shorter prompt"
        )
    return room if max_tokens < 0 else min(room, max_tokens)


def sampling_options(modelfile: Modelfile | None) -> dict[str, Any]:
    """What a Modelfile says of penalties, as arguments of ``stream_generate``."""
    penalties = modelfile.penalties() if modelfile is not None else {}
    if not penalties:
        return {}
    from mlx_lm.sample_utils import make_logits_processors

    return {"logits_processors": make_logits_processors(None, **penalties)}
