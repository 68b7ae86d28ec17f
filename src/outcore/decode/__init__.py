"""From prompts to answers: requests, scheduling, sampling, drafts, and stored prompts."""
