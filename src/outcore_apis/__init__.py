"""OpenAI's Responses, Anthropic's Messages and Ollama's API; found as entry points of ``outcore.apis``."""
