"""The metadata is in pyproject.toml; here is what a wheel needs beyond Python files."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithPatches(build_py):
    """Copies `patches/` into wheels. It stands at the top of the repository, where people look for
    it, and package data has to be inside the package; an editable install finds the original."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "glm_multiuser", "mindformers", "patches")
            shutil.rmtree(target, ignore_errors=True)  # `build` may be there from an earlier time
            shutil.copytree("patches", target)


setup(cmdclass={"build_py": BuildWithPatches})
