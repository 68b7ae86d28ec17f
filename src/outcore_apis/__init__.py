"""OpenAI's Responses, Anthropic's Messages and Ollama's API, found by the group ``outcore.apis``."""
