"""Rows of tables that a pass will look up: known before it begins, so that they are read meanwhile."""
