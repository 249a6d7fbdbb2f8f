"""Workers that are killed or hang, and a trial's actor that is killed: what is lost, and that nothing is left."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import ray
import torch
from ray.air.execution._internal import RayActorManager
from ray.tune.execution import tune_controller

from dmlstudy.engine import gang as gangs
from dmlstudy.engine import worker
from dmlstudy.engine.gang import Gang, GangLost, GangTrainable, keep_in_vault
from dmlstudy.engine.mailbox import Command, Mailbox, Reply
from dmlstudy.engine.ray_private import tune_mended
from dmlstudy.engine.recorder import Vault
from dmlstudy.engine.tune_run import engine_settings
from dmlstudy.records import ResourcesConfig, TrialConfig

from .conftest import DMLSTUDY, Record, left, marked, runs_left_open, seconds_until_training, trials_of

pytestmark = pytest.mark.timeout(900)

SPEC = """
name: gang-faults
data: {name: digits}
embedder: {dim: 8, width: 4}
batch: {classes: all, images_per_class: 4, per_epoch: 4}
training: {epochs: 60, head_lr_mult: 1, lr: 1.0e-3}
families:
  sound: {space: multi_similarity}
search: {trials_per_family: 6, scheduler: none}
protocol: {num_folds: 1, verdict_seeds: 1, fold_models: false}
resources: {silence_limit_s: 20, recycle_after: 2}
"""


def until(condition: Callable[[], Any], what: str, timeout: float = 240) -> Any:
    """The condition's value as soon as it is true."""
    end = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < end, f"{what} did not come in {timeout} s"
        time.sleep(0.05)
    return value


# One study, three faults


@pytest.mark.long
def test_a_study_survives_a_killed_worker_a_killed_actor_and_a_hang(
    tmp_path: Path, record_fault: Record
) -> None:
    (tmp_path / "study.yaml").write_text(SPEC)
    mark, store, log = uuid.uuid4().hex, tmp_path / "store", tmp_path / "shown"
    command = [*DMLSTUDY, "run", tmp_path / "study.yaml", "--store", store]
    folder = store / "studies" / "gang-faults"
    engine_log = folder / "engine.log"
    with open(log, "wb") as file:
        study = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | {"DMLSTUDY_TEST": mark}
        )

        def wait_for(path: Path, pattern: str) -> None:
            def there() -> bool:
                assert study.poll() is None, log.read_text()
                return bool(re.search(pattern, path.read_text(), re.MULTILINE))

            until(there, f"{pattern!r} in {path.read_text()}")

        def hit(name: str, sent: signal.Signals, than: int) -> float:
            """Send a process of the trial after this one a signal, as soon as it trains; returns when it was."""
            seconds_until_training(folder, than=than)
            until(lambda: marked(mark, name), name)[0].send_signal(sent)
            return time.monotonic()

        try:
            wait_for(log, "^1/8 ")
            hurt = hit("RayTrainWorker", signal.SIGKILL, than=0)
            again = seconds_until_training(folder, since=hurt)
            wait_for(
                engine_log, r"goes on with fresh workers \(retry 1 of 1\): a worker of the trial was lost"
            )
            record_fault("DDP worker killed in mid-step", 0, again)
            wait_for(log, "^2/8 ")
            hurt = hit("GangTrainable", signal.SIGKILL, than=1)
            again = seconds_until_training(folder, since=hurt)
            wait_for(log, "sound #2 +interrupted, goes on later: .*died")
            record_fault("trial's actor killed", 0, again)
            wait_for(log, "^4/8 ")
            hurt = hit("RayTrainWorker", signal.SIGSTOP, than=3)
            wait_for(log, "^5/8 .*failed: no sign of life for 20 s")
            seconds = seconds_until_training(folder, than=4, since=hurt)
            record_fault("hang in a collective (watchdog at 20 s)", 1, seconds)
            assert study.wait(timeout=300) == 0, log.read_text()
        finally:
            study.kill()
            study.wait()

    assert left(mark) == [], "a process outlived its study"
    trials = trials_of(store, "gang-faults")
    states = [trial.state.name for trial in trials]
    assert states == ["COMPLETE"] * 4 + ["FAIL", "COMPLETE"]
    for lost in (trials[1], trials[2]):
        assert list(lost.intermediate_values) == list(range(1, 61)), "a report was lost or said twice"
    assert trials[4].user_attrs["reason"] == "no sign of life for 20 s"
    assert "they have served 2 trials" in engine_log.read_text()
    assert not list((engine_log.parent / "checkpoints").glob("*")), "a checkpoint outlived its study"
    assert runs_left_open(store, "gang-faults") == []


# A gang by itself, on a Ray whose tables can be read


@pytest.fixture(scope="module")
def mark() -> Iterator[str]:
    """A Ray for this file, whose processes carry the mark."""
    mark = uuid.uuid4().hex
    os.environ["DMLSTUDY_TEST"] = mark
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=True,
        dashboard_host="127.0.0.1",
        dashboard_port=0,
        log_to_driver=False,
    )
    try:
        yield mark
    finally:
        ray.shutdown()
        del os.environ["DMLSTUDY_TEST"]


def trial_config() -> dict[str, Any]:
    """A trial of epochs so many that it only ends by force."""
    return TrialConfig.model_validate(
        {
            "family": "f",
            "data": {"name": "digits"},
            "embedder": {"dim": 8, "width": 4},
            "batch": {"classes": "all", "images_per_class": 4, "per_epoch": 4},
            "training": {"epochs": 100_000},
            "loss": {"name": "contrastive"},
            "num_folds": 1,
        }
    ).model_dump(mode="json")


def placement_groups() -> list[str]:
    table = ray.util.placement_group_table()
    return [name for name, group in table.items() if group["state"] != "REMOVED"]


def rank_of(pid: int) -> int:
    """The rank of a worker, as Ray Train's controller notes it in its log."""
    assert ray._private.worker._global_node is not None
    logs = Path(ray._private.worker._global_node.get_logs_dir_path()) / "train"
    noted = "".join(log.read_text() for log in logs.glob("ray-train-app-controller-*.log"))
    (rank,) = re.findall(rf"pid={pid}\) world_rank=(\d+)", noted)
    return int(rank)


@pytest.mark.filterwarnings("ignore")  # those of Ray's own modules, which are imported in this process here
@pytest.mark.parametrize(
    ("sent", "rank", "reason", "blameless"),
    [
        (signal.SIGSTOP, 1, "no sign of life for 5 s", False),
        (signal.SIGKILL, 0, "a worker of the trial was lost: rank {rank}: .*died", True),
        pytest.param(
            *(signal.SIGKILL, 1, "a worker of the trial was lost: rank {rank}: .*died", True),
            marks=pytest.mark.long,
        ),
    ],
)
def test_nothing_is_left_of_a_killed_gang(
    mark: str, tmp_path: Path, sent: signal.Signals, rank: int, reason: str, blameless: bool
) -> None:
    gang = Gang(ResourcesConfig(), str(tmp_path), f"gang-{uuid.uuid4().hex}")
    gang.hand_over(Command("endless", trial_config(), str(tmp_path / "checkpoint")))
    assert gang.next_reply("endless").kind == "report"
    gang._resources = ResourcesConfig(silence_limit_s=5)  # not before: a first report waits for imports
    workers = {rank_of(process.pid): process for process in marked(mark, "RayTrainWorker")}
    assert sorted(workers) == [0, 1]
    assert placement_groups()
    workers[rank].send_signal(sent)
    with pytest.raises(GangLost, match=reason.format(rank=rank)) as lost:
        until(lambda: gang.next_reply("endless").kind != "report", "an end")
    assert lost.value.blameless is blameless
    started = time.monotonic()
    gang.kill()
    until(lambda: not marked(mark, "RayTrainWorker"), "the end of the workers", 10)
    until(lambda: not placement_groups(), "the release of their places", 10)
    assert time.monotonic() - started < 10, "they end at once, and not when Ray looks, after 15 s and more"
    until(lambda: not marked(mark, "TrainController"), "the end of their controller", 60)
    until(lambda: not marked(mark, "ray::Mailbox"), "the end of their mailbox", 60)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_killed_vault_is_started_again_and_takes_files(mark: str, when: str) -> None:
    name = f"vault-{uuid.uuid4().hex}"
    vault = Vault.options(name=name).remote()
    assert ray.get(vault.files.remote("t"), timeout=60) == {}
    (process,) = marked(mark, "ray::Vault")
    if when == "after":
        keep_in_vault(name, "t", {"w": b"1"})
    process.kill()
    process.wait(timeout=10)
    if when == "after":
        assert ray.get(vault.files.remote("t"), timeout=60) == {}, "what it held is lost, and that is told"
    keep_in_vault(name, "t", {"w": b"1"})
    assert ray.get(vault.files.remote("t"), timeout=60) == {"w": b"1"}
    ray.kill(vault)


# A gang whose workers and whose Ray are played


class PlayedMailbox:
    """Answers as Ray's handle of a Mailbox does, from a loop that begins when ``up`` is set."""

    up = threading.Event()
    up.set()
    places: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._mailbox = Mailbox.__ray_actor_class__()
        self._asked: list[Future[Any]] = []
        self.is_dead = False
        threading.Thread(target=self._run, daemon=True).start()

    @classmethod
    def options(cls, *, scheduling_strategy: Any) -> SimpleNamespace:
        cls.places.append(scheduling_strategy)
        return SimpleNamespace(remote=cls)

    def _run(self) -> None:
        self.up.wait()
        self._loop.run_forever()

    def __getattr__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda *given: self._call(getattr(self._mailbox, name)(*given)))

    def _call(self, called: Any) -> Future[Any]:
        self._asked.append(asyncio.run_coroutine_threadsafe(called, self._loop))
        return self._asked[-1]

    def kill(self) -> None:
        self.is_dead = True
        for asked in self._asked:
            asked.cancel()


@pytest.fixture
def gang_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Gang]:
    """``gang_of(workers, **resources)``: a gang all of whose workers are this function, which gets the mailbox."""

    def get(asked: Future[Any], timeout: float | None = None) -> Any:
        try:
            return asked.result(timeout)
        except CancelledError:
            raise ray.exceptions.ActorDiedError from None
        except TimeoutError:
            raise ray.exceptions.GetTimeoutError from None

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", lambda asked, timeout: tuple(map(list, wait(asked, timeout))))
    monkeypatch.setattr(ray, "kill", PlayedMailbox.kill)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "00" * 28))
    monkeypatch.setattr(gangs, "Mailbox", PlayedMailbox)
    monkeypatch.setattr(PlayedMailbox, "places", [])

    def made(workers: Callable[[Any, str], None], **resources: Any) -> Gang:
        def fit(loop: Any, loop_config: dict[str, Any], *_: Any, **__: Any) -> None:
            mailbox = loop_config["mailbox"]
            workers(mailbox, ray.get(mailbox.command.remote(0, 0, 0.0)).trial)

        monkeypatch.setattr(gangs, "fit", fit)
        return Gang(ResourcesConfig(**resources), "nowhere", "played")

    return made


def said(mailbox: Any, trial: str, *replies: Reply) -> None:
    for reply in replies:
        ray.get(mailbox.reply.remote(trial, reply))


def test_the_first_word_to_a_mailbox_that_comes_up_late_is_waited_for(
    gang_of: Callable[..., Gang], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process takes longer than any call may: as long as starting may take is the limit, and not a call's."""
    monkeypatch.setattr(gangs, "CALL_TIMEOUT_S", 0.1)
    up = threading.Event()
    monkeypatch.setattr(PlayedMailbox, "up", up)
    gang = gang_of(lambda mailbox, trial: said(mailbox, trial, Reply("begun"), epoch(1)))
    gang.hand_over(Command("t", {}, ""))  # does not wait: it is not up before this has returned
    threading.Timer(0.5, up.set).start()
    assert gang.next_reply("t") == epoch(1)
    assert gang.kill()


def test_a_batch_is_a_sign_of_life_and_a_hang_is_none(gang_of: Callable[..., Gang]) -> None:
    over = threading.Event()

    def workers(mailbox: Any, trial: str) -> None:
        said(mailbox, trial, Reply("begun"))
        for _ in range(16):  # an epoch of twice the limit
            time.sleep(0.25)
            mailbox.beat.remote()
        said(mailbox, trial, epoch(1))
        over.wait(30)

    gang = gang_of(workers, silence_limit_s=2)
    gang.hand_over(Command("t", {}, ""))
    assert gang.next_reply("t").kind == "report"
    with pytest.raises(GangLost, match=r"^no sign of life for 2 s$") as lost:
        gang.next_reply("t")
    assert not lost.value.blameless
    over.set()
    assert gang.kill()


def test_a_mailbox_is_beside_its_tune_actor_and_its_loss_is_nobodys_fault(
    gang_of: Callable[..., Gang],
) -> None:
    over = threading.Event()

    def workers(mailbox: Any, trial: str) -> None:
        said(mailbox, trial, Reply("begun"))
        over.wait(30)

    gang = gang_of(workers)
    (place,) = PlayedMailbox.places
    assert (place.node_id, place.soft) == (ray.get_runtime_context().get_node_id(), False)
    gang.hand_over(Command("t", {}, ""))
    threading.Timer(0.7, gang._mailbox.kill).start()
    with pytest.raises(GangLost, match="mailbox was lost") as lost:
        gang.next_reply("t")
    assert lost.value.blameless
    assert not lost.value.is_final
    over.set()
    assert gang.kill()


def test_a_node_that_lacks_something_is_told_and_not_tried_again(gang_of: Callable[..., Gang]) -> None:
    unfit = Reply("unfit", reason="node 10.0.0.3 has no /data")
    gang = gang_of(lambda mailbox, trial: said(mailbox, trial, Reply("begun"), unfit))
    gang.hand_over(Command("t", {}, ""))
    with pytest.raises(GangLost, match=r"^node 10.0.0.3 has no /data$") as lost:
        gang.next_reply("t")
    assert (lost.value.blameless, lost.value.unstarted, lost.value.unfit) == (True, True, True)
    assert lost.value.is_final
    assert gang.kill()


# Without workers


class PlayedGang:
    """Says what it was given, one thing after another; an exception is raised."""

    said: ClassVar[list[Any]] = []
    num_started = 0
    refuses = False
    num_killed = 0

    def __init__(self, *_: Any) -> None:
        PlayedGang.num_started += 1

    def hand_over(self, command: Command) -> None:
        if self.refuses:
            raise ray.exceptions.GetTimeoutError("no answer")

    def next_reply(self, trial: str) -> Reply:
        said = self.said.pop(0)
        if isinstance(said, Exception):
            raise said
        return said

    def kill(self) -> bool:
        PlayedGang.num_killed += 1
        return True

    def is_alive(self) -> bool:
        return False


@pytest.fixture
def trainable(monkeypatch: pytest.MonkeyPatch) -> Callable[..., GangTrainable]:
    """``trainable(said, retries=1)``: a Tune actor that has begun a trial with workers that are played."""
    monkeypatch.setattr(gangs, "Gang", PlayedGang)
    monkeypatch.setattr(GangTrainable, "trial_id", "t")
    for name, value in (("num_started", 0), ("num_killed", 0), ("refuses", False)):
        monkeypatch.setattr(PlayedGang, name, value)

    def begun(*said: Any, **resources: Any) -> GangTrainable:
        monkeypatch.setattr(PlayedGang, "said", list(said))
        actor = GangTrainable.__new__(GangTrainable)
        actor.setup(
            {
                "trial": trial_config(),
                "pause_after": None,
                "resources": ResourcesConfig(**resources).model_dump(),
                "storage": "nowhere",
                "checkpoints": "/nowhere",
                "vault": "none",
                "expected": {},
            }
        )
        return actor

    return begun


def epoch(step: int) -> Reply:
    return Reply("report", {"step": float(step)})


def lost() -> GangLost:
    return GangLost("a worker of the trial was lost: its node died", blameless=True)


def test_a_trial_that_makes_progress_is_not_failed_however_often_it_is_lost(
    trainable: Callable[..., GangTrainable],
) -> None:
    """After each loss it repeats its reports and makes one more, as on spot nodes."""
    given: list[Any] = []
    for step in range(1, 7):
        given += [*(epoch(each) for each in range(1, step + 1)), lost()]
    given = [each._replace(energy_wh=0.5) if isinstance(each, Reply) else each for each in given]
    actor = trainable(*given, Reply("finished", {"score": 1.0}, energy_wh=0.25))
    results = [actor.step() for _ in range(7)]
    assert [result["metrics"].get("step") for result in results] == [1, 2, 3, 4, 5, 6, None]
    assert [result["energy_wh"] for result in results] == [
        0.5,
        1.5,
        3.0,
        5.0,
        7.5,
        10.5,
        10.75,
    ]  # repeats cost
    del results[-1]["energy_wh"]
    assert results[-1] == {"metrics": {"score": 1.0}, "done": True, "failure": "", "paused": False}
    assert PlayedGang.num_started == 7


def test_a_trial_that_is_lost_at_the_same_place_again_and_again_fails_and_says_so(
    trainable: Callable[..., GangTrainable],
) -> None:
    actor = trainable(epoch(1), lost(), epoch(1), lost(), epoch(1), lost(), retries=2)
    assert actor.step()["metrics"]["step"] == 1
    ended = actor.step()
    assert ended["done"]
    assert not ended["unstarted"]
    assert ended["failure"] == (
        "a worker of the trial was lost: its node died (3 times in a row, without an epoch in between)"
    )


@pytest.mark.parametrize("is_unfit", [True, False])
def test_workers_that_never_serve_fail_no_configuration(
    trainable: Callable[..., GangTrainable], is_unfit: bool
) -> None:
    bad = GangLost("node 10.0.0.3 ...", blameless=True, unstarted=True, unfit=is_unfit)
    actor = trainable(bad, bad)
    ended = actor.step()
    assert (ended["unstarted"], ended["unfit"]) == (True, is_unfit)
    assert PlayedGang.num_started == (1 if is_unfit else 2), (
        "what another start cannot mend is not started again"
    )


def test_a_gang_that_does_not_take_its_trial_is_ended_before_its_actor(
    trainable: Callable[..., GangTrainable], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PlayedGang, "refuses", True)
    with pytest.raises(ray.exceptions.GetTimeoutError):
        trainable()
    assert PlayedGang.num_killed == 1


@pytest.mark.parametrize(("gpus", "kill_s", "cleanup_s"), [(0, 8, "15"), (0.5, 45, "60")])
def test_workers_on_gpus_have_longer_to_end(
    monkeypatch: pytest.MonkeyPatch, gpus: float, kill_s: float, cleanup_s: str
) -> None:
    resources = ResourcesConfig(gpus_per_worker=gpus)
    waited: list[float] = []
    gang = Gang.__new__(Gang)
    gang._resources, gang._placement_group = resources, "places"
    gang._thread = SimpleNamespace(is_alive=lambda: not waited, join=waited.append)  # type: ignore[assignment]
    gang._mailbox = None
    monkeypatch.setattr(ray.util, "remove_placement_group", lambda group: None)
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    assert gang.kill()
    assert waited == [kill_s]
    assert engine_settings(resources)["TUNE_FORCE_TRIAL_CLEANUP_S"] == cleanup_s


def test_a_trial_begins_with_its_gpus_memory_given_back_and_tells_the_most_it_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU is played: what CUDA itself does is not tested here."""
    said: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: said.append("emptied"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: said.append(f"reset {device}"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**20)
    for name in ("cpu", "cuda:1"):
        worker.free_gpu_memory(torch.device(name))
    assert said == ["emptied", "reset cuda:1"]
    assert worker.gpu_peak(torch.device("cpu")) == {}
    assert worker.gpu_peak(torch.device("cuda:1")) == {"gpu_peak_mib": 3.0}


def test_the_node_on_which_workers_could_not_be_started_is_named() -> None:
    error = RuntimeError(
        "ray::RayTrainWorker.execute() (pid=7, ip=10.0.0.3, actor_id=1)\nRuntimeError: no driver"
    )
    assert gangs._where(error) == " on node 10.0.0.3"
    assert gangs._where(RuntimeError("no driver")) == gangs._where(None) == ""


def test_an_actor_killed_for_memory_is_a_lost_actor_to_tune(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Exception] = []
    monkeypatch.setattr(RayActorManager, "_actor_task_failed", lambda self, task, error: heard.append(error))
    manager, task = RayActorManager.__new__(RayActorManager), object()
    with tune_mended():
        message = "Task was killed due to the node running low on memory.\nMemory on the node was 22GB / 23GB"
        manager._actor_task_failed(
            tracked_actor_task=task, exception=ray.exceptions.OutOfMemoryError(message)
        )  # type: ignore[arg-type]
        other = ValueError("another")
        manager._actor_task_failed(tracked_actor_task=task, exception=other)  # type: ignore[arg-type]
    assert isinstance(heard[0], ray.exceptions.RayActorError)
    assert "OutOfMemoryError" in str(heard[0])
    assert heard[1] is other


def test_no_actor_is_given_up_before_the_search_ends() -> None:
    """A generation ends, nothing is waiting at that moment, and every gang is kept for the next one."""
    with tune_mended():
        kept = tune_controller._ObjectCache()
    for actor in ("first", "second", "third"):
        assert kept.cache_object("places", actor)
    assert list(kept.flush_cached_objects()) == []
    assert kept.pop_cached_object("places") == "first"
    assert list(kept.flush_cached_objects(force_all=True)) == ["second", "third"]
    assert kept.num_cached_objects == 0


@pytest.mark.parametrize(
    ("resources", "num_trials", "recycled"),
    [
        ({}, 1, False),
        ({}, 100, True),
        ({"recycle_after": 0}, 1000, False),
        ({"isolation": "process"}, 1, True),
    ],
)
def test_a_gang_is_recycled_after_so_many_trials(
    monkeypatch: pytest.MonkeyPatch, resources: dict[str, Any], num_trials: int, recycled: bool
) -> None:
    gang = gang_that_has_grown(monkeypatch, 0.0, **resources)
    gang._num_trials = num_trials
    assert bool(gang.why_recycle()) is recycled


def test_a_gang_that_grows_is_recycled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not gang_that_has_grown(monkeypatch, 500.0, recycle_growth_mib=500).why_recycle()
    grown = gang_that_has_grown(monkeypatch, 501.0, recycle_growth_mib=500)
    assert grown.why_recycle() == "they have grown by 501 MiB since their first trial"


def gang_that_has_grown(monkeypatch: pytest.MonkeyPatch, mib: float, **resources: Any) -> Gang:
    class Mailbox:
        class growth_mib:
            @staticmethod
            def remote() -> float:
                return mib

    monkeypatch.setattr(ray, "get", lambda value, timeout: value)
    gang = Gang.__new__(Gang)
    gang._resources = ResourcesConfig(**resources)
    gang._mailbox = Mailbox()
    gang._num_trials = 1
    return gang
