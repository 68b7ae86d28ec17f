"""Commands about this machine, its files and its processes: what a run does not need."""
