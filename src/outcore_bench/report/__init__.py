"""A page from results: ``inputs`` reads, ``sections`` says what there is to show, ``page`` and ``markdown`` write."""
