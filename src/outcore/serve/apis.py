"""All APIs: OpenAI's, and the ``APIS`` of packages' modules of the group ``apis`` (see ``packages.py``)."""

from __future__ import annotations

from ..packages import modules
from . import completions, openai
from .api import Api

OPENAI = Api("openai", openai.error_body, (*openai.ROUTES, *completions.ROUTES))


def all_apis() -> tuple[Api, ...]:
    return (OPENAI, *(api for module in modules("apis").values() for api in module.APIS))
