"""The metadata is in pyproject.toml; here is what a wheel needs beyond Python files."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))  # a build in isolation does not look here

from glm_multiuser.backends.native.compiler import BuildError, build, build_here
from glm_multiuser.package_data import FOLDERS, IGNORED


class BuildEverything(build_py):
    """Compiles the kernels, and copies the files beside the code into wheels. They are outside the
    package, where people look for them; an editable install reads them there."""

    def run(self) -> None:
        super().run()
        package = Path("." if self.editable_mode else self.build_lib, "glm_multiuser")
        library = package / "backends" / "native" / "native.so"
        try:
            if self.editable_mode:  # it stays on this machine
                build_here()
            else:
                build(library)
        except BuildError as error:
            library.unlink(missing_ok=True)  # may be there from an earlier time
            print(f"glm_multiuser is installed without its kernels: {error}", file=sys.stderr)
        if not self.editable_mode:
            shutil.rmtree(package / "data", ignore_errors=True)  # from an earlier build
            for folder in FOLDERS:
                ignored = shutil.ignore_patterns(*IGNORED)
                shutil.copytree(folder, package / "data" / folder, ignore=ignored)


class WheelForAnyPython(bdist_wheel):
    """The kernels are for one kind of processor, but do not know Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class WithBinary(Distribution):
    """What is in the wheel depends on the machine that built it."""

    def has_ext_modules(self) -> bool:
        return True


setup(
    cmdclass={"build_py": BuildEverything, "bdist_wheel": WheelForAnyPython}, distclass=WithBinary
)
