"""The server: requests of several APIs, one engine thread behind them."""
