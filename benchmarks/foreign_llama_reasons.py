"""Which of llama.cpp's server tests say nothing about another server, and which cannot pass here, and why."""

from __future__ import annotations

WORDS = "its model's words, or counts of its tokens"
HUB = "a model of the Hub"

BOUND = {
    "chat_completion::test_chat_completion[": WORDS,
    "chat_completion::test_chat_completion_cached_tokens": WORDS,
    "chat_completion::test_chat_completion_stream[": WORDS,
    "chat_completion::test_chat_completion_with_openai_library": WORDS,
    "chat_completion::test_chat_template": "its tokenizer's word for the beginning of a text",
    "chat_completion::test_return_progress[": "counts of batches of its tokens (and there is no return_progress)",
    "completion::test_completion[": WORDS,
    "completion::test_completion_stream[": WORDS,
    "completion::test_completion_with_openai_library": WORDS,
    "completion::test_completion_stream_with_openai_library": WORDS,
    "completion::test_completion_prompt_cache": WORDS,
    "completion::test_completion_response_fields[I believe the meaning of life is-32": "its tokenizer's word for a "
    "text's beginning",
    "compat_anthropic::test_anthropic_vision_base64_with_multimodal_model": HUB,
    "compat_oai_responses::test_responses_with_openai_library": WORDS,
    "compat_oai_responses::test_responses_stream_with_openai_library": WORDS,
    "security::test_local_media_file[../../../tools-file://mtmd/test-1.jpeg-True": HUB,
    "security::test_local_media_file[../../../tools-file:////mtmd//test-1.jpeg-True": HUB,
}
"""By a test's name; what ends within its parameters is the beginning of it."""

IMAGES = "an image is the client's error, 400, not the server's, 500"

REASONS = {
    "chat_completion::test_chat_template_assistant_prefill[prefill1": "parts of a text are joined as they are, as "
    "by mlx_lm.server, not by empty lines",
    "compat_oai_responses::test_responses_stream_with_llama_telemetry": "return_progress: the engine does not tell how "
    "far a prompt is; and an answer that its limit ends is incomplete, as OpenAI's, not completed",
    "compat_anthropic::test_anthropic_tool_result_with_image": IMAGES,
    "compat_anthropic::test_anthropic_vision_format_accepted": IMAGES,
    "security::test_cors_options[web.mydomain.fr-Access-Control-Allow-Headers": "the headers that were asked for are "
    "named: * does not stand for Authorization (Fetch, 4.9)",
    "security::test_cors_proxy_only_forwards_explicit_proxy_headers": "there is no proxy for MCP servers",
}
"""The same of those that are no faults."""
