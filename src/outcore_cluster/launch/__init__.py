"""``outcore launch``, and running a command as one of the ranks that it starts."""
