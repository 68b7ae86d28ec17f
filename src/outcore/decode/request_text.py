"""Checks texts in requests, without importing MLX."""

from __future__ import annotations

from ..errors import RequestError
from ..text import half_character

# Arguments of ``apply_chat_template`` that no request may give: they would run code from the request, or return no
# text.
TEMPLATE_OWN = frozenset(
    {"add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length",
     "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize",
     "tokenizer_kwargs", "tools", "truncation"}
)  # fmt: skip


def checked_text(text: str, where: str) -> str:
    """Returns the text. Raises ``RequestError`` if it has half of a surrogate pair, which no tokenizer takes (JSON can
    escape one). ``where``: the parameter to name."""
    if (at := half_character(text)) is not None:
        wanted = "write the pair, or the character"
        raise RequestError(f"{where}: character {at} is half of a surrogate pair; {wanted}", param=where)
    return text
