"""Deployment with NVIDIA Triton, and on several devices with Ray Serve."""
