"""The server: HTTP in front of `MultiUserLLM`. It knows nothing about MindSpore."""
