"""Constrained answers: JSON of a schema, or required tool calls, by llguidance, which the extra ``json`` installs. The
server finds ``grammars`` by the group ``outcore.grammars``."""
