"""What Tune is kept from, read in its own parts: tests/faults and tests/end_to_end see it in studies that run."""

from __future__ import annotations

import re

import pytest
from ray.tune.execution import class_cache

from dmlstudy.engine.ray_private import tune_mended

SECRET = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL")


class Nothing:
    pass


def propagated() -> dict[str, str]:
    """What Tune puts into the runtime environment of its actors, which Ray writes into its log."""
    options = class_cache._ActorClassCache().get(Nothing)._default_options
    return dict(options["runtime_env"]["env_vars"])


def test_cloud_keys_stay_with_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SECURITY_TOKEN", "AWS_SESSION_TOKEN")
    for name in (*keys, "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"):
        monkeypatch.setenv(name, "1")
    assert keys[0] in propagated(), "Ray has changed: is the mend still needed?"
    with tune_mended():
        assert not set(keys) & set(propagated())
        assert propagated()["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] == "1"


def test_nothing_that_ray_hands_on_sounds_like_a_secret() -> None:
    """Nor does Ray Train's own list, which is part of Tune's: a new Ray that adds one is noticed here."""
    with tune_mended():
        assert [name for name in class_cache.ENV_VARS_TO_PROPAGATE if SECRET.search(name)] == []
