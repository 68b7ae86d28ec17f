"""The commands, as ``outcore`` runs them."""
