"""From a name and a budget to a model that runs within it."""
