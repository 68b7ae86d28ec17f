"""The server's page, ``/metrics`` and ``/openapi.json``. The server finds ``pages`` by the group ``outcore.pages``."""
