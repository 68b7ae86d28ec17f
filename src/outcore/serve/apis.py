"""The APIs that are served. What belongs to none of them is told in the words of the first."""

from __future__ import annotations

from . import anthropic_messages, llama_cpp, ollama, openai

__all__ = ["APIS"]

APIS = (openai.API, anthropic_messages.API, ollama.API, llama_cpp.API)
