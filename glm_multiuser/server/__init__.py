"""The HTTP server of `MultiUserLLM`; it does not depend on MindSpore."""
