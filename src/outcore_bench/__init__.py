"""``outcore bench``, ``matrix``, ``report`` and ``perplexity``: one JSON document a run, and what is drawn from it."""
