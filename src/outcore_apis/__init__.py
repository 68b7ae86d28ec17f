"""APIs beside OpenAI's chats and completions: its Responses, Anthropic's Messages and Ollama's.

An API is a table of routes, and a translation between its bodies and the core's one request and one stream of events
(``outcore.serve.api``). ``apis`` lists them; the server finds that module by the group ``outcore.apis``.
"""
