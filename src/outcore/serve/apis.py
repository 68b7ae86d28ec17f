"""The APIs that are served: OpenAI's, and those that packages bring.

A package's module of the group ``apis`` (``packages.py`` says how it is found) has ``APIS``, a sequence of ``Api``.
"""

from __future__ import annotations

from ..packages import modules
from . import completions, openai
from .api import Api

OPENAI = Api("openai", openai.error_body, (*openai.ROUTES, *completions.ROUTES))


def all_apis() -> tuple[Api, ...]:
    """All of them. Errors of addresses that belong to none are told in the words of the first."""
    return (OPENAI, *(api for module in modules("apis").values() for api in module.APIS))
