"""Conversations that outlive their slot: in memory, on disk, and back."""
