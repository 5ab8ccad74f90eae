"""Models as MindSpore cells: they know tensors and users, never requests or text."""
