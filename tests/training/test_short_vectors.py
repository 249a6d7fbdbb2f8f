"""Short forms of embeddings: their vectors, their scores in a trial's verdict, and settings that have none."""

from __future__ import annotations

import numpy as np
import pytest
from support.verdict_trials import verdict_trial

from dmlstudy import retrieval
from dmlstudy.metric_names import ShortForm
from dmlstudy.records import TrialConfig
from dmlstudy.training import short_vectors
from dmlstudy.training.short_vectors import eight_bits, forms, leading, one_bit, short_vector_scores


def trial_config(embedder: dict[str, object] | None = None, **changes: object) -> TrialConfig:
    plain = verdict_trial("red").model_copy(update={"phase": "search"}).model_dump()
    return TrialConfig.model_validate(plain | {"embedder": embedder or {}} | changes)


RNG = np.random.default_rng(0)


def unit(values: np.ndarray) -> np.ndarray:
    return (values / np.linalg.norm(values, axis=1, keepdims=True)).astype(np.float32)


Z_ND = unit(RNG.normal(size=(60, 8)) + np.repeat(np.eye(8)[:6], 10, axis=0))
LABELS_N = np.repeat(np.arange(6), 10)


def test_vectors_of_each_form() -> None:
    z_ND = np.array([[0.6, 0.0, 0.8], [0.0, 0.0, 1.0]], np.float32)
    np.testing.assert_allclose(leading(z_ND, 2), [[1, 0], [0, 0]])
    whole = np.array([95.0, 0.0, 127.0])
    np.testing.assert_allclose(eight_bits(z_ND)[0], whole / np.linalg.norm(whole), rtol=1e-6)
    np.testing.assert_allclose(one_bit(z_ND), np.array([[1, -1, 1], [-1, -1, 1]]) / np.sqrt(3), rtol=1e-6)


def test_signs_are_ordered_as_hamming_distances() -> None:
    bits_ND = one_bit(Z_ND)
    squared_NN = np.square(bits_ND[:, None] - bits_ND[None]).sum(2)
    hamming_NN = ((Z_ND > 0)[:, None] != (Z_ND > 0)[None]).sum(2)
    np.testing.assert_allclose(squared_NN, 4 * hamming_NN / 8, atol=1e-5)


def test_every_size_has_its_forms_and_the_whole_two() -> None:
    found = [form for form, _ in forms(Z_ND, (2, 4))]
    sizes = [ShortForm(size, bits) for size in (2, 4) for bits in (32, 8, 1)]
    assert found == [*sizes, ShortForm(None, 8), ShortForm(None, 1)]


def test_scores_are_those_of_the_vectors() -> None:
    config = trial_config(
        phase="verdict",
        short_vectors=(4, 2, 64),
        embedder={"dim": 8},
        recall_at=(1, 2),
        objective="r_precision",
    )
    found = short_vector_scores(Z_ND, LABELS_N, None, None, config)
    for form, short_NE in forms(Z_ND, (2, 4)):
        wanted = retrieval.evaluate(short_NE, LABELS_N, (1, 2))
        for metric in ("map_at_r", "recall_at_1", "r_precision"):
            assert found.metrics[form.of(metric)] == pytest.approx(wanted[metric])
    assert "recall_at_2_dim2" not in found.metrics
    assert found.unit_scores is not None
    assert len(found.unit_scores.units) == 6
    assert found.unit_scores.sums.keys() == found.metrics.keys()


def test_a_search_trial_has_none() -> None:
    config = trial_config(short_vectors=(2,), embedder={"dim": 8})
    assert short_vector_scores(Z_ND, LABELS_N, None, None, config).metrics == {}


def test_matryoshka_s_sizes_are_scored_by_themselves() -> None:
    config = trial_config(phase="verdict", embedder={"dim": 8, "matryoshka": [2, 4]})
    assert short_vectors.sizes_of(config) == (2, 4)
    assert short_vectors.sizes_of(trial_config(phase="verdict", embedder={"dim": 8})) == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embedder": {"dim": 8, "matryoshka": "4 2"}}, r"embedder\.matryoshka: \[4, 2\] must be ascending"),
        ({"embedder": {"dim": 8, "matryoshka": 8}}, r"embedder\.matryoshka: \[8\] must be .* below the"),
        (
            {"embedder": {"dim": 9, "matryoshka": [3], "fusion": "heads"}},
            r"embedder\.matryoshka: \[3\] cuts embeddings, which has no meaning beside embedder\.fusion: heads",
        ),
        (
            {"embedder": {"dim": 8, "matryoshka": [2], "space": "ball"}},
            r"embedder\.matryoshka: \[2\] cuts embeddings, which has no meaning beside embedder\.space: ball",
        ),
        (
            {"embedder": {"dim": 8, "unit_norm": False}, "short_vectors": (2,)},
            r"protocol\.short_vectors: \[2\] cuts embeddings, .* embedder\.unit_norm: false",
        ),
        (
            {"embedder": {"dim": 8, "matryoshka": [2]}, "regularizer": {"name": "structure", "params": {}}},
            r"beside regularizer\.name: structure; leave one of them out",
        ),
    ],
)
def test_what_cannot_be_cut_is_told_in_one_line(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        short_vectors.check(trial_config(**changes))
    assert "\n" not in str(raised.value)
