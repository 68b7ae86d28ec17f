"""``outcore batch``: answers files of requests in OpenAI's batch format, as many in each forward pass as have room."""
