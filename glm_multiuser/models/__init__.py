"""Models as MindSpore cells, in terms of tensors and users, not of requests or text."""
