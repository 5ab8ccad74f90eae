"""The engine: requests in, token ids out. It knows nothing about text."""
