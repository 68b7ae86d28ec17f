"""The prefix cache on disk: what was computed of prompts is found again, and never computed twice."""
