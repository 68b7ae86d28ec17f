"""OpenAI's Responses, Anthropic's Messages and Ollama's API; the server finds ``apis`` by the group ``outcore.apis``."""
