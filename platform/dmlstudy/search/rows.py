"""Optuna's storage in a database, with a statement for each table where Optuna sends many."""

from __future__ import annotations

import copy
import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import optuna
import sqlalchemy
from optuna.distributions import distribution_to_json
from optuna.storages._rdb import models
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import orm

Rows: TypeAlias = Sequence[tuple[type[models.BaseModel], Sequence[Mapping[str, Any]]]]
"""Tables with rows of one trial, without its id."""

_IS_OPEN = (models.TrialModel.trial_id == sqlalchemy.bindparam("of_trial")) & models.TrialModel.state.in_(
    (TrialState.RUNNING, TrialState.WAITING)
)

_scores = models.TrialIntermediateValueModel
_ADD_SCORE = (
    sqlalchemy.insert(_scores)
    .from_select(
        ["trial_id", "step", "intermediate_value", "intermediate_value_type"],
        sqlalchemy.select(
            models.TrialModel.trial_id,
            sqlalchemy.bindparam("at_step", type_=_scores.step.type),
            sqlalchemy.bindparam("score", type_=_scores.intermediate_value.type),
            sqlalchemy.bindparam("kind", type_=_scores.intermediate_value_type.type),
        ).where(_IS_OPEN),
    )
    .execution_options(preserve_rowcount=True)  # of an insert SQLAlchemy forgets it otherwise
)
_END = (
    sqlalchemy.update(models.TrialModel)
    .where(_IS_OPEN)
    .values(state=sqlalchemy.bindparam("to_state"), datetime_complete=sqlalchemy.bindparam("at"))
)
_FORGET = sqlalchemy.delete(models.TrialUserAttributeModel).where(
    models.TrialUserAttributeModel.trial_id == sqlalchemy.bindparam("of_trial"),
    models.TrialUserAttributeModel.key == sqlalchemy.bindparam("named"),
)


class RowsTogether(optuna.storages.RDBStorage):
    """Optuna's storage, which writes by a statement for each table what a driver writes most.

    Of a new trial Optuna sends each parameter and attribute by itself, and looks up an earlier trial's distribution of
    each parameter to compare it. A study's space is fixed by its file, and points are checked against it before they
    are stored. Of a score and an end it reads first what it then writes.
    """

    def set_trial_intermediate_value(self, trial_id: int, step: int, intermediate_value: float) -> None:
        """As Optuna's; the first score at a step is one statement."""
        stored, kind = _scores.intermediate_value_to_stored_repr(intermediate_value)
        row = {"of_trial": trial_id, "at_step": step, "score": stored, "kind": kind}
        try:
            with self.engine.begin() as connection:
                if connection.execute(_ADD_SCORE, row).rowcount > 0:
                    return
        except sqlalchemy.exc.IntegrityError:
            pass  # there is one
        super().set_trial_intermediate_value(trial_id, step, intermediate_value)

    def end_trial(
        self,
        trial_id: int,
        state: TrialState,
        values: Sequence[float] | None = None,
        attrs: Mapping[str, Any] | None = None,
    ) -> None:
        """Store how a trial ended, with user attributes on that, all of it or nothing.

        Raises KeyError where there is no such trial, and UpdateFinishedTrialError where it has ended.
        """
        ended = {"to_state": state, "at": datetime.datetime.now()}
        tables: Rows = [
            (models.TrialValueModel, _value_rows(values or ())),
            (models.TrialUserAttributeModel, _attribute_rows(attrs or {})),
        ]
        with self.engine.begin() as connection:
            was_open = connection.execute(_END, {"of_trial": trial_id, **ended}).rowcount > 0
            if was_open and attrs:
                # a driver killed before it stored the state may have left some
                connection.execute(_FORGET, [{"of_trial": trial_id, "named": key} for key in attrs])
            if was_open:
                _insert(connection, trial_id, tables)
        if not was_open:
            self.check_trial_is_updatable(trial_id, self.get_trial(trial_id).state)

    def _get_prepared_new_trial(
        self, study_id: int, template_trial: FrozenTrial | None, session: orm.Session
    ) -> models.TrialModel:
        """The row of a trial within a transaction, as Optuna writes it, with its parameters and attributes."""
        new = template_trial
        if new is None:
            return super()._get_prepared_new_trial(study_id, None, session)
        bare = copy.copy(new)
        bare.params, bare.user_attrs, bare.system_attrs = {}, {}, {}
        trial = super()._get_prepared_new_trial(study_id, bare, session)
        params = [
            {
                "param_name": name,
                "param_value": new.distributions[name].to_internal_repr(value),
                "distribution_json": distribution_to_json(new.distributions[name]),
            }
            for name, value in new.params.items()
        ]
        tables: Rows = [
            (models.TrialParamModel, params),
            (models.TrialUserAttributeModel, _attribute_rows(new.user_attrs)),
            (models.TrialSystemAttributeModel, _attribute_rows(new.system_attrs)),
        ]
        _insert(session, trial.trial_id, tables)
        return trial


def _insert(within: sqlalchemy.Connection | orm.Session, trial_id: object, tables: Rows) -> None:
    """Add rows of a trial in a transaction, by a statement for each table."""
    for table, rows in tables:
        if rows:
            within.execute(sqlalchemy.insert(table), [{"trial_id": trial_id, **row} for row in rows])


def _value_rows(values: Sequence[float]) -> list[dict[str, Any]]:
    stored = map(models.TrialValueModel.value_to_stored_repr, values)
    return [
        {"objective": objective, "value": value, "value_type": kind}
        for objective, (value, kind) in enumerate(stored)
    ]


def _attribute_rows(attrs: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value_json": json.dumps(value)} for key, value in attrs.items()]


def end_trial(
    storage: optuna.storages.BaseStorage,
    trial_id: int,
    state: TrialState,
    values: Sequence[float] | None,
    attrs: Mapping[str, Any],
) -> None:
    """Store how a trial ended, with user attributes on that; in a database all of it or nothing."""
    if isinstance(storage, RowsTogether):
        storage.end_trial(trial_id, state, values, attrs)
        return
    for key, value in attrs.items():
        storage.set_trial_user_attr(trial_id, key, value)
    storage.set_trial_state_values(trial_id, state, values)
