"""The command line: one file a command, with ``run``. What a user gives and what cannot be meant is refused with a
UsageError that names the flag; functions here do not say so each time."""
