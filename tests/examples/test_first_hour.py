"""examples/ascend/first_hour.sh: what gets into its archive, with commands that only pretend."""

from __future__ import annotations

import os
import subprocess
import tarfile
from pathlib import Path
from typing import Optional

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples/ascend/first_hour.sh"
SECRET = "sk-secret-0123456789"
PROMPT = "a question of a person"
GLM_MULTIUSER = f"""#!/bin/sh
case "$1" in
    demo) echo "[user 1] {PROMPT}"; echo "4 of 4 answers are identical"; exit $DEMO ;;
    bench) while [ "$1" != --json ]; do shift; done; echo '{{"tok_s": 1}}' > "$2" ;;
    plan) echo "plan of $*, kept in $HOME/models" ;;
    *) echo "$*" ;;
esac
"""


def start(
    folder: Path, demo: int, with_card: bool, home: str, out: Path
) -> subprocess.CompletedProcess[str]:
    commands = folder / "bin"
    commands.mkdir(exist_ok=True)
    fakes = {"glm-multiuser": GLM_MULTIUSER, "python": "#!/bin/sh\necho python\n"}
    if with_card:
        fakes["npu-smi"] = "#!/bin/sh\necho HBM-Usage\n"
    for name, content in fakes.items():
        (commands / name).write_text(content)
        (commands / name).chmod(0o755)
    environment = {
        "PATH": f"{commands}:{os.defpath}",
        "HOME": home,
        "TMPDIR": str(folder),
        "OUT": str(out),
        "DEMO": str(demo),
        "GLM_MULTIUSER_API_KEYS": SECRET,
    }
    return subprocess.run(
        ["bash", str(SCRIPT), "910B"], env=environment, capture_output=True, text=True
    )


def run(
    folder: Path, demo: int, with_card: bool, home: Optional[str] = None
) -> tuple[int, str, dict[str, str]]:
    """-> exit code, what was printed, and the files of the archive."""
    out = folder / "out"
    result = start(folder, demo, with_card, str(folder) if home is None else home, out)
    (archive,) = out.glob("*.tar.gz")
    found = {}
    with tarfile.open(archive) as files:
        for member in files.getmembers():
            if member.isfile():
                packed = files.extractfile(member)
                assert packed is not None
                found[Path(member.name).name] = packed.read().decode()
    return result.returncode, result.stdout, found


@pytest.mark.parametrize("with_card", [True, False])
def test_the_archive_has_every_step_and_no_secrets(tmp_path: Path, with_card: bool) -> None:
    code, printed, files = run(tmp_path, 0, with_card)
    assert code == 0
    assert files["demo.txt"] == "4 of 4 answers are identical\n"
    assert files["bench.json"] == '{"tok_s": 1}\n'
    assert files["selfcheck.txt"] == "selfcheck --device-target Ascend\n"
    kept = "selfcheck --device-target Ascend --compile-cache-dir (temporary)/graphs\n"
    assert files["start.txt"] == files["start-again.txt"] == kept
    assert files["plan.txt"] == "plan of plan --model chatglm-6b --device 910B, kept in ~/models\n"
    assert ("npu-smi.txt" in files) == ("bench.npu-smi.txt" in files) == with_card
    assert ("npu-smi      ... not there" in printed) == (not with_card)
    everything = "".join([printed, *files, *files.values()])
    assert SECRET not in everything
    assert PROMPT not in everything


def test_a_step_that_fails_does_not_stop_the_rest(tmp_path: Path) -> None:
    code, printed, files = run(tmp_path, 3, with_card=False)
    assert code == 1
    assert "demo         ... exit code 3, see demo.txt" in printed
    steps = [line.split("\t")[:2] for line in files["steps.tsv"].splitlines()]
    assert ["demo", "3"] in steps
    assert ["bench", "0"] in steps
    assert ["plan", "0"] in steps


def test_a_home_that_begins_every_path_is_left(tmp_path: Path) -> None:
    _, _, files = run(tmp_path, 0, with_card=False, home="/")
    assert files["plan.txt"].endswith(", kept in //models\n")
    assert "(temporary)/graphs" in files["start.txt"]


def test_a_folder_that_cannot_be_made_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ended = start(tmp_path, 0, False, str(tmp_path), tmp_path / "file" / "out")
    assert (ended.returncode, ended.stdout) == (1, "")


def test_an_archive_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    tar = tmp_path / "bin" / "tar"
    tar.parent.mkdir()
    tar.write_text("#!/bin/sh\nexit 2\n")
    tar.chmod(0o755)
    ended = start(tmp_path, 0, False, str(tmp_path), tmp_path)
    assert ended.returncode == 1
    assert "has everything" not in ended.stdout
    report = Path(ended.stderr.split(" is in ")[1].strip())
    assert (report / "bench.txt").exists()
