"""The command line: one module per command, each with ``run``. Bad input raises a UsageError that names the flag."""
