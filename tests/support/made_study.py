"""Studies as their drivers leave them, made without a driver: trials of two families on the bundled digits."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.trial import TrialState, create_trial

from dmlstudy import data, embedders
from dmlstudy.records import BatchConfig, DataConfig, EmbedderConfig, LossConfig, TrainingConfig, TrialConfig
from dmlstudy.registry.tracking import StudyTracker
from dmlstudy.search.storage import open_storage
from dmlstudy.store import Store

SPACE: dict[str, BaseDistribution] = {
    "training.lr": FloatDistribution(1e-4, 1e-2, log=True),
    "loss.margin": FloatDistribution(0.1, 0.5),
    "loss.weighting": CategoricalDistribution(["power", "exponential"]),
}
STATES = {
    "finished": TrialState.COMPLETE,
    "pruned": TrialState.PRUNED,
    "failed": TrialState.FAIL,
}
SPEC = "name: small\ndata: {name: digits}  # <b>not bold</b>\n"


class Maker:
    """Writes a study as its driver would."""

    def __init__(self, store: Store, study: str, *, with_state: bool = True, **origin: str) -> None:
        self.store, self.study = store, study
        self.tracker = StudyTracker(
            store,
            study,
            {"study.yaml": SPEC, "search_space.yaml": "{}\n"},
            origin={"objective": "map_at_r", "num_test_images": "896", **origin},
            environment='{"python": "3.11.9", "packages": {"torch": "9.9"}, "code": {"commit": "abc"}}',
            trial_tags={"workers": "2", "device": "cpu"},
        )
        self._with_state = with_state
        if with_state:
            self.state("running", started=time.time())
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.optuna = optuna.create_study(
            study_name=study, storage=open_storage(store), direction="maximize", load_if_exists=True
        )

    def state(self, state: Any, **details: Any) -> None:
        details |= {"fingerprint": "f", "spec": {"data": {"name": "digits"}, "families": {"alpha": {}}}}
        self.store.write_state(self.study, state, **details)

    def config(self, family: str, phase: Any = "search", seed: int = 0) -> TrialConfig:
        return TrialConfig(
            family=family,
            phase=phase,
            seed=seed,
            data=DataConfig(name="digits"),
            embedder=EmbedderConfig(dim=8, width=4),
            batch=BatchConfig(),
            training=TrainingConfig(epochs=0 if family == "untrained" else 2),
            loss=LossConfig(name="contrastive"),
        )

    def search(
        self,
        family: str,
        status: str,
        score: float | None,
        curve: Mapping[int, float] = {},
        reason: str = "",
        **params: Any,
    ) -> None:
        """A trial of the search, in Optuna and in MLflow."""
        names = {name.replace("__", "."): value for name, value in params.items()}
        trial = create_trial(
            state=STATES[status],
            value=score if status == "finished" else None,
            params={f"{family}/{name}": value for name, value in names.items()},
            distributions={f"{family}/{name}": SPACE[name] for name in names},
            intermediate_values=dict(curve),
            user_attrs={"family": family, "generation": 0, **({"reason": reason} if reason else {})},
        )
        self.optuna.add_trial(trial)
        number = len(self.optuna.get_trials(deepcopy=False)) - 1
        run_id = self.tracker.start_trial(f"{family} #{number}", self.config(family), number)
        metrics = {} if score is None else {"map_at_r": score}
        self.tracker.end_trial(run_id, status, [], metrics, reason)  # type: ignore[arg-type]

    def judge(self, family: str, seed: int, score: float, losses: tuple[float, ...] = ()) -> str:
        """A trial of the verdict; the id of its run."""
        run_id = self.tracker.start_trial(
            f"{family} verdict seed {seed}", self.config(family, "verdict", seed), None
        )
        curve = [{"step": float(step), "train_loss": loss} for step, loss in enumerate(losses, 1)]
        metrics = {"test_map_at_r": score, "test_recall_at_1": score + 0.1}
        self.tracker.end_trial(run_id, "finished", curve, metrics)
        return run_id

    def keep_embedder(self, run_id: str, family: str, seed: int) -> None:
        """A small network on 8 x 8 digits as the run's model, with what it was trained on."""
        made = embedders.build("small_conv", 8, width=4, in_channels=1, image_size=8, seed=seed)
        config = self.config(family, "verdict", 1)
        test = data.load("digits").test
        with tempfile.TemporaryDirectory() as folder:
            embedders.save(
                made,
                folder,
                {"family": family, "config": config.model_dump(mode="json")},
                test.read(test.labels_N[:2]),  # type: ignore[arg-type]
            )
            self.tracker.log_model(run_id, folder)

    def end(self, winner: str | None, **summary: str) -> None:
        self.tracker.end_study("finished", ({"winner": winner} if winner else {}) | summary)
        if self._with_state:
            self.state("finished")
