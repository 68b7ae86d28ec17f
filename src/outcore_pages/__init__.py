"""What a server tells of itself: its page, ``/metrics`` and ``/openapi.json``.

``pages`` lists the addresses; the server finds that module by the group ``outcore.pages``.
"""
