"""Saved sessions of users, in memory and on disk."""
