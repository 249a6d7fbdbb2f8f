"""Keys of a study that have no meaning beside one another."""

from __future__ import annotations

from collections.abc import Mapping


def check_alone(subject: str, others: Mapping[str, object], remedy: str = "leave one of them out") -> None:
    """Raise ValueError for the first of the ``others``, key to value, that is set beside the subject."""
    for key, value in others.items():
        if value:
            raise ValueError(f"{subject} has no meaning beside {key}: {value}; {remedy}")
