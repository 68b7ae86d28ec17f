"""llama.cpp's own addresses and fields; found as an entry point of ``outcore.apis``."""
