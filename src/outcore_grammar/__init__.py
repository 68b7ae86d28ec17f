"""Answers of a given form: JSON of a schema, or calls of tools that are required.

llguidance, which the extra ``json`` brings, says which tokens may come next. ``grammars`` has what the server asks for;
it finds that module by the group ``outcore.grammars``.
"""
