"""``outcore report``: ``sections`` builds the content, ``page`` and ``markdown`` write it."""
