"""The metadata is in pyproject.toml; what has to be compiled will be named here."""

from setuptools import setup

setup()
