"""Beyond one process: behind NVIDIA Triton, and on many devices with Ray Serve."""
