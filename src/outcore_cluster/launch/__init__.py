"""``outcore launch``, and commands as one rank of several."""
