"""Where a study's trials keep their state: what is refused before anything starts, and what is removed at last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dmlstudy.data import state_file
from dmlstudy.data.state_file import FILE
from dmlstudy.engine import gang
from dmlstudy.engine.mailbox import Command
from dmlstudy.engine.tune_run import checkpoints_folder
from dmlstudy.spec import study_file
from dmlstudy.spec.study_file import SpecError, StudySpec
from dmlstudy.store import Store
from dmlstudy.studies import checks, run

ACCOUNT = "abfss://container@account.dfs.core.windows.net"


def study_at(storage_path: str | None) -> StudySpec:
    return study_file.parse(
        {
            "name": "kept",
            "data": {"name": "digits"},
            "embedder": {"dim": 8, "width": 4},
            "batch": {"classes": "all"},
            "protocol": {"num_folds": 2},
            "families": {"contrastive": {"space": "contrastive"}},
            "resources": {"storage_path": storage_path},
        }
    )


@pytest.mark.parametrize(
    ("storage_path", "below"),
    [
        (None, "{store}/studies/kept/checkpoints"),
        ("/mnt/states/", "/mnt/states/kept"),
        ("file:///mnt/states", "file:///mnt/states/kept"),
        ("s3://bucket", "s3://bucket/kept"),
        (
            "s3://bucket/a/b?region=eu-central-1&scheme=https",
            "s3://bucket/a/b/kept?region=eu-central-1&scheme=https",
        ),
        ("s3://bucket/a?endpoint_override=host:9000", "s3://bucket/a/kept?endpoint_override=host:9000"),
        ("gs://bucket/a", "gs://bucket/a/kept"),
        ("hdfs://user@host:8020/a", "hdfs://user@host:8020/a/kept"),
        ("hdfs:///a", "hdfs:///a/kept"),
        (f"{ACCOUNT}/a", f"{ACCOUNT}/a/kept"),
    ],
)
def test_each_study_has_a_folder_of_its_name(storage_path: str | None, below: str, tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert checkpoints_folder(study_at(storage_path), store) == below.format(store=tmp_path)


@pytest.mark.parametrize(
    ("storage_path", "line"),
    [
        ("states", "expected an absolute path or a URI, as /folder or s3://bucket/folder"),
        ("", "expected an absolute path or a URI"),
        ("s3:/bucket/a", "expected an absolute path or a URI"),
        ("s3a://bucket/a", "no filesystem 's3a'; did you mean 's3'? known are: s3, gs, "),
        ("https://host/a", "no filesystem 'https'; "),
        ("s3://", "'s3://' names no folder; write as s3://bucket/folder"),
        ("s3://?region=x", "names no folder"),
        ("s3://bucket/a#b", "names no folder"),
        ("file://host/a", "names another machine; write file:///folder with three slashes"),
    ],
)
def test_a_bad_storage_path_is_refused_in_one_line(storage_path: str, line: str) -> None:
    with pytest.raises(SpecError) as caught:
        study_at(storage_path)
    assert str(caught.value).startswith("resources.storage_path: ")
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "storage_path",
    [
        "s3://an-id:SECRET@bucket/a",
        "s3://an-id:begin/SECRET+end@bucket/a",
        "s3a://an-id:SECRET@bucket/a",
        f"abfss://:SECRET@{ACCOUNT.partition('@')[2]}/a",
        f"{ACCOUNT}/a?client_secret=SECRET",
        f"{ACCOUNT}/a?sv=2022&sig=SECRET",
        "s3://bucket/a?region=x&secret_key=SECRET",
        "s3://bucket/a?session_token=SECRET",
        "s3:/an-id:SECRET@bucket/a",
        "s3://an-id:SECRET@",
    ],
)
def test_a_secret_in_it_is_refused_and_not_repeated(storage_path: str) -> None:
    with pytest.raises(SpecError, match=r"^resources\.storage_path: ") as caught:
        study_at(storage_path)
    assert "SECRET" not in str(caught.value)


def test_a_place_that_can_be_written_is_left_as_it_was(s3: Any, tmp_path: Path) -> None:
    checks.check_storage(study_at(None))
    for root, files in (
        (str(tmp_path), lambda: [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()]),
        (s3.uri("states"), lambda: s3.files("states")),
    ):
        checks.check_storage(study_at(root))
        assert files() == []
        state_file.at(state_file.join(root, "kept", "trial")).write(b"of an earlier session")
        checks.check_storage(study_at(root))
        assert files() == [f"kept/trial/{FILE}"]


@pytest.mark.parametrize("what", ["file in the way", "no bucket", "no server", "odd option"])
def test_a_place_that_cannot_be_written_is_told_before_anything_starts(
    what: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    root, reason = str(tmp_path / "file"), "Not a directory"
    if what == "odd option":
        root, reason = "s3://bucket/a?colour=red", "colour"
    elif what != "file in the way":
        s3 = request.getfixturevalue("s3")
        root, reason = s3.uri("a", bucket="no-such" if what == "no bucket" else None), "NO_SUCH_BUCKET"
        if what == "no server":
            s3.stop()
            reason = "onnect"

    def connected(*arguments: Any) -> None:
        raise AssertionError("the cluster was asked")

    monkeypatch.setattr(run, "connected", connected)
    with pytest.raises(SpecError) as caught:
        run.run_study(study_at(root), Store(tmp_path / "store"), address=None, tell=print)
    message = str(caught.value)
    assert message.startswith(f"resources.storage_path: {root} cannot be written and read (")
    assert reason in message
    assert "or name another" in message
    assert "\n" not in message
    assert not list(tmp_path.glob("store/studies/*"))


@pytest.mark.parametrize("where", ["store", "folder", "s3"])
def test_a_study_that_is_over_leaves_nothing_and_others_stay(
    where: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    server = request.getfixturevalue("s3") if where == "s3" else None
    root = server.uri("states") if server else str(tmp_path / "states")
    store = Store(tmp_path / "states")
    folder = checkpoints_folder(study_at(None if where == "store" else root), store)
    ours = {"store": "studies/kept/checkpoints"}.get(where, "kept")
    for name in (f"{ours}/one", f"{ours}/two", f"{ours}-too/one"):
        state_file.at(state_file.join(root, name)).write(b"state")
    told: list[str] = []
    run._remove_checkpoints(folder, told.append)
    assert told == []
    left = server.files("states") if server else [str(p.relative_to(root)) for p in Path(root).rglob(FILE)]
    assert left == [f"{ours}-too/one/{FILE}"]
    if server:
        server.stop()
        run._remove_checkpoints(folder, told.append)
        assert told[0].startswith(f"what trials kept below {folder} could not be removed: ")
    else:
        assert not Path(folder).exists()


class Workers:
    """Stands for a gang, and remembers what it is told to do."""

    def __init__(self) -> None:
        self.commands: list[Command] = []

    def hand_over(self, command: Command) -> None:
        self.commands.append(command)


def test_workers_are_told_a_folder_of_the_trial_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = study_at("s3://bucket/a?region=x")
    family = found.families["contrastive"]
    config = found.trial_config(family, study_file.default_values(family)).model_dump(mode="json")
    workers = Workers()
    monkeypatch.setattr(gang, "Gang", lambda *_: workers)
    trainable = object.__new__(gang.GangTrainable)
    trainable._trial_info = None
    trainable.setup(
        {
            "trial": config,
            "pause_after": None,
            "resources": found.file.resources.model_dump(),
            "storage": "",
            "checkpoints": checkpoints_folder(found, Store(Path("store"))),
            "vault": "",
            "expected": {},
        }
    )
    (command,) = workers.commands
    assert command.checkpoint == f"s3://bucket/a/kept/{gang.checkpoint_name(config)}?region=x"
