"""Bytes between the processes of a run on several machines: sockets and threads, never a model."""
