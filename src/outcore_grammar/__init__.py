"""Answers of a given form: JSON of a schema, calls of tools that are required, or a grammar of the client's own.

llguidance, which the extra ``json`` brings, says which tokens may come next. ``grammars`` has what the server asks for;
it finds that module by the group ``outcore.grammars``.
"""
