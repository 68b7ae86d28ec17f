"""Multi-token-prediction heads, which draft for a model from its last hidden states."""
