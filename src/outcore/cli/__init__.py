"""The command line: one file a command, each with ``setup_arg_parser()`` and ``main()``."""
