"""Files written whole: by one call, by two at once, after a kill, and where there is no room for the name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dmlstudy.files import is_held, written_whole

HOLDS = """
import sys, time
from pathlib import Path
from dmlstudy.files import written_whole
with written_whole(Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    print("holds", flush=True)
    time.sleep(60)
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_there_whole_or_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "below" / "a.txt"
    with written_whole(path) as file:
        file.write(b"first")
        assert not path.exists()
    with pytest.raises(ValueError, match="closed"), written_whole(path) as file:
        file.close()
    assert (path.read_bytes(), names(path.parent)) == (b"first", ["a.txt"])


def test_two_calls_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    with written_whole(path) as one:
        one.write(b"of the first")
        with written_whole(path) as other:
            other.write(b"of the other")
        assert path.read_bytes() == b"of the other"
    assert (path.read_bytes(), names(tmp_path)) == (b"of the first", ["a.txt"])


def test_the_next_call_removes_what_a_killed_one_has_left_and_nothing_else(tmp_path: Path) -> None:
    path, other = tmp_path / "a[1].txt", tmp_path / "b.txt"
    own = tmp_path / ".a[1].txt.notes.draft"
    own.write_text("of somebody")
    with (
        subprocess.Popen([sys.executable, "-c", HOLDS, str(path)], stdout=subprocess.PIPE) as killed,
        subprocess.Popen([sys.executable, "-c", HOLDS, str(other)], stdout=subprocess.PIPE) as living,
    ):
        for process in (killed, living):
            assert process.stdout is not None
            assert process.stdout.readline() == b"holds\n"
        (draft,) = tmp_path.glob(".a[[]1[]].txt.*" + "[0-9a-f]" * 31 + ".draft")
        assert is_held(draft)
        killed.kill()
        killed.wait()
        assert not is_held(draft)
        with written_whole(path) as file:
            file.write(b"whole")
        assert not draft.exists()
        assert len(list(tmp_path.glob(".b.txt.*.draft"))) == 1
        living.kill()
    assert own.exists()
    assert path.read_bytes() == b"whole"


def test_a_name_that_is_too_long_is_named(tmp_path: Path) -> None:
    path = tmp_path / ("a" * (os.pathconf(tmp_path, "PC_NAME_MAX") + 1))
    with pytest.raises(OSError, match="File name too long") as error, written_whole(path):
        pass
    assert error.value.filename == str(path)
    assert names(tmp_path) == []
