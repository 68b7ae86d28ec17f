"""From logits to text: requests, sampling, speculation, and what is kept of prompts."""
