"""The server's page, and ``/metrics``. The server finds ``pages`` by the group ``outcore.pages``."""
