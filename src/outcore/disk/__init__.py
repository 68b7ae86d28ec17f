"""Reads byte ranges of files into memory. Knows nothing about models."""
