"""The trials of a search that wait at a rung to be promoted.

A paused trial is RUNNING in the storage, with a score at its next rung and a user attribute that names the
generations in which it was promoted before. So it is known again after an interruption.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import replace

from dmlstudy.search.early_stopping import Asha, EarlyStopping, SearchCurve
from dmlstudy.search.ledger import Entry
from dmlstudy.search.samplers import FAMILY
from dmlstudy.search.subsearch import Subsearch


class PausedTrials:
    """Those that wait, under a rule that may promote them; with any other rule nobody waits."""

    def __init__(self, rule: EarlyStopping) -> None:
        self._rule = rule
        self._promotion = rule if isinstance(rule, Asha) else None

    def __len__(self) -> int:
        return 0 if self._promotion is None else self._promotion.num_waiting

    @property
    def may_wait(self) -> bool:
        """True if the rule lets trials pause."""
        return self._promotion is not None

    def next_rung(self, entry: Entry) -> int | None:
        """The step after which a trial pauses next; None where it runs to its end."""
        return self._rule.pause_after(entry.curve)

    def last_rung(self, entry: Entry) -> int:
        """The step of the rung that a trial has left last; 0 before the first one."""
        if not entry.promotions:
            return 0
        return self._rule.pause_after(_then(entry, len(entry.promotions) - 1)) or 0

    def has_come(self, entry: Entry) -> bool:
        """True if a trial that has not ended has reached its next rung."""
        is_open = not entry.trial.state.is_finished()
        return is_open and self.next_rung(entry) in entry.trial.intermediate_values

    def add(self, entry: Entry) -> None:
        """Let a trial wait at its rung, which the sampler sees as the end of it."""
        rung = self.next_rung(entry)
        assert self._promotion is not None
        assert rung is not None
        entry.subsearch.pause(entry.trial, entry.turn, rung)
        self._promotion.pause(entry.curve)

    def leave(self, entry: Entry) -> None:
        """Take a trial from those that wait."""
        assert self._promotion is not None
        self._promotion.leave(entry.curve)

    def show(self, entry: Entry) -> None:
        """Let the sampler see a trial that was promoted as one stopped at the rung that it has left last."""
        entry.subsearch.pause(entry.trial, entry.turn, self.last_rung(entry))

    def recall(self, entry: Entry) -> None:
        """Take in the rungs that a trial of an earlier session has left behind."""
        for num_promotions in range(len(entry.promotions)):
            self._stand(_then(entry, num_promotions))

    def note_stopped(self, entry: Entry) -> None:
        """Let a trial that was stopped at a rung, or given up there, keep its standing at it."""
        if self.next_rung(entry) in entry.trial.intermediate_values:
            self._stand(entry.curve)

    def _stand(self, curve: SearchCurve) -> None:
        if self._promotion is not None:
            self._promotion.pause(curve)
            self._promotion.leave(curve)

    def forget(self, entry: Entry) -> None:
        """Let a failed trial leave its places at rungs to others."""
        if self._promotion is not None:
            self._promotion.forget(entry.curve)

    def promotable(self, subsearch: Subsearch) -> Entry | None:
        """The trial that goes on next, by its score among its peers'."""
        turn = None if self._promotion is None else self._promotion.promotable(subsearch.name)
        return None if turn is None else Entry.of(subsearch.waiting[turn].trial, subsearch, turn)

    def leading(self, subsearch: Subsearch, families: Container[str]) -> Entry | None:
        """Of these families the best at the highest rung."""
        turns = [] if self._promotion is None else self._promotion.waiting(subsearch.name)
        return next(self._of(subsearch, turns, families), None)

    def hopeless(
        self, subsearch: Subsearch, running: Iterable[Entry], families: Container[str]
    ) -> Iterator[Entry]:
        """Of these families those that cannot be promoted any more, whatever comes of running trials and new ones.

        Each may leave when it comes, as from ``of``.
        """
        if self._promotion is None:
            return iter(())
        curves = [entry.curve for entry in running]
        turns = self._promotion.hopeless(subsearch.name, subsearch.num_left, curves)
        return self._of(subsearch, turns, families)

    def of(self, subsearch: Subsearch) -> Iterator[Entry]:
        """All that wait, by turn; one at a time, for they are many."""
        turns = [] if self._promotion is None else sorted(self._promotion.waiting(subsearch.name))
        return self._of(subsearch, turns, subsearch.families)

    def _of(self, subsearch: Subsearch, turns: Iterable[int], families: Container[str]) -> Iterator[Entry]:
        for turn in turns:
            trial = subsearch.waiting[turn].trial
            if trial.user_attrs[FAMILY] in families:
                yield Entry.of(trial, subsearch, turn)


def _then(entry: Entry, num_promotions: int) -> SearchCurve:
    """A trial's curve as its peers saw it before its later promotions."""
    return replace(entry.curve, num_promotions=num_promotions)
