"""``outcore report``: ``inputs`` reads results, ``sections`` builds the content, ``page`` and ``markdown`` write it."""
