"""Commands about models, this machine, its cache folder and its processes. No run of a model needs this package."""
