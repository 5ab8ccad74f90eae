"""MindSpore's operators, on any device."""
