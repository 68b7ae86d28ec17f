"""``python -m outcore`` is ``outcore``."""

from .cli.main import entry

entry()
