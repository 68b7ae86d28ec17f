"""``outcore batch``: files of requests in OpenAI's batch format, as many answered in each forward pass as have room."""
