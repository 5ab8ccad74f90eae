"""Structured output: grammars of answers, and the tokens that they allow."""
