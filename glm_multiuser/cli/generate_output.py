"""The output of `glm-multiuser generate`: JSON lines, in a file or on stdout."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Optional, TextIO, Union

from glm_multiuser.errors import ConfigError


class Rows:
    """Writes and counts rows.

    Args:
        out: the file; None for stdout.

    Attributes:
        count: number of complete rows.
        failed: number of rows with an error.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, out: Optional[Path]) -> None:
        self.out = out
        self.count = 0
        self.failed = 0
        self._mode: Literal["w", "a"] = "w"
        self._target: Optional[TextIO] = None
        """The open file, if there is one."""
        if out is None:
            return
        if out.exists() and not out.is_file():
            self._target = _open(out, "w")
        else:  # stays as it is, or absent, until there is something to write
            is_new = not os.path.lexists(out)
            _open(out, "a").close()
            if is_new:
                out.unlink()

    def __enter__(self) -> Rows:
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        if self._target is not None:
            self._target.close()

    def resume(self, prompts: Sequence[Union[str, list[int]]]) -> None:
        """Counts the existing rows, and truncates an incomplete one.

        Args:
            prompts: prompts of all rows.

        Raises:
            ConfigError: no file, or one whose rows do not match these prompts.
        """
        if self.out is None:
            raise ConfigError("--resume needs --out, the file to go on with")
        if not self.out.is_file():
            raise ConfigError(f"out is {self.out}; --resume needs a file that it can read")
        content = self.out.read_bytes()
        end = content.rfind(b"\n") + 1
        for line in content[:end].split(b"\n")[:-1]:
            try:
                row = json.loads(line)
                good = row["index"] == self.count and row["prompt"] == prompts[self.count]
            except (ValueError, TypeError, LookupError):
                good = False
            if not good:
                raise ConfigError(
                    f"line {self.count + 1} of {self.out} is not the row of prompt {self.count}; "
                    "--resume goes on with the output for the same prompts"
                )
            self._add(row)
        os.truncate(self.out, end)
        self._mode = "a"

    def write(self, row: dict[str, Any]) -> None:
        """Writes and flushes one line, so that results can be read while others run."""
        if self.out is not None and self._target is None:
            self._target = _open(self.out, self._mode)
        target = self._target or sys.stdout
        text = json.dumps(row, ensure_ascii=False)
        try:
            text.encode(target.encoding)
        except UnicodeEncodeError:  # another encoding on stdout, or a lone surrogate
            text = json.dumps(row)
        target.write(text + "\n")
        target.flush()
        self._add(row)

    def _add(self, row: dict[str, Any]) -> None:
        self.count += 1
        self.failed += "error" in row

    def report(self, total: int) -> str:
        """Returns the number of rows out of `total`, and how to resume."""
        if self.out is None or not self.count:
            return f"{self.count} of {total} rows are written"
        return f"{self.count} of {total} rows are in {self.out}; --resume goes on with them"


def _open(out: Path, mode: Literal["w", "a"]) -> TextIO:
    try:
        return out.open(mode, encoding="utf-8", newline="\n")
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}") from None
