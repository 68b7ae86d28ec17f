"""Ways to draft that need weights: draft models, low-bit copies of the model itself, multi-token-prediction heads.

``drafts`` names them to the core, whose ``decode.speculative.sources`` says what a kind of draft brings.
"""
