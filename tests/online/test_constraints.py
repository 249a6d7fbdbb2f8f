"""Streams of constraints: closure against brute force, OPML's rule against its transcription, laws, files, errors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from scipy.stats import chisquare

from dmlstudy.online import enumeration
from dmlstudy.online.constraint_files import read_constraints
from dmlstudy.online.constraints import (
    IndexedConstraints,
    Single,
    blocks,
    close,
    count_implied,
    one_pass_triplets,
    sample_pairs,
    sample_triplets,
    stream_of,
)

Triplet = tuple[int, int, int]
Pair = tuple[int, int]
Arity = Literal[2, 3]


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def triplets(*rows: Triplet) -> IndexedConstraints:
    return IndexedConstraints(np.array(rows))


def pairs(similar: list[Pair], dissimilar: list[Pair]) -> IndexedConstraints:
    return IndexedConstraints(
        np.array(similar + dissimilar), np.array([True] * len(similar) + [False] * len(dissimilar))
    )


def listed(stream: IndexedConstraints) -> list[tuple[Any, ...]]:
    """Triplets as they are, pairs with the lower row first and their flag."""
    rows = stream.index_TC.tolist()
    if stream.is_similar_T is None:
        return [tuple(row) for row in rows]
    return [(*sorted(row), flag) for row, flag in zip(rows, stream.is_similar_T.tolist(), strict=True)]


def as_set(stream: IndexedConstraints) -> set[tuple[Any, ...]]:
    """The constraints; fails if one is there twice."""
    found = listed(stream)
    assert len(set(found)) == len(found)
    return set(found)


def brute_closure(seeds: IndexedConstraints) -> set[tuple[Any, ...]]:
    """The paper's three rules on matrices of pairs until nothing changes, then all that holds but the seeds."""
    num = int(seeds.index_TC.max()) + 1
    similar, dissimilar = np.zeros((2, num, num), dtype=bool)
    for number, row in enumerate(seeds.index_TC.tolist()):
        if seeds.is_similar_T is None:
            known = [(similar, row[0], row[1]), (dissimilar, row[0], row[2])]
        else:
            known = [(similar if seeds.is_similar_T[number] else dissimilar, row[0], row[1])]
        for matrix, i, j in known:
            matrix[i, j] = matrix[j, i] = True
    while True:
        before = similar.sum() + dissimilar.sum()
        for i, j, k in itertools.product(range(num), repeat=3):
            if similar[i, j] and similar[j, k]:
                similar[i, k] = True
            if similar[i, j] and dissimilar[j, k]:
                dissimilar[i, k] = dissimilar[k, i] = True
        if similar.sum() + dissimilar.sum() == before:
            break
    every = range(num)
    implied: set[tuple[Any, ...]]
    if seeds.is_similar_T is None:
        implied = {
            (a, p, n)
            for a, p, n in itertools.product(every, repeat=3)
            if a != p and similar[a, p] and dissimilar[a, n]
        }
    else:
        implied = {(i, j, True) for i, j in itertools.combinations(every, 2) if similar[i, j]} | {
            (i, j, False) for i, j in itertools.combinations(every, 2) if dissimilar[i, j]
        }
    return implied - set(listed(seeds))


def small_labels(seed: int, arity: Arity) -> NDArray[np.int64]:
    rng = generator(seed)
    labels_N = rng.integers(0, rng.integers(2, 6), rng.integers(8, 15))
    labels_N[:4] = [0, 0, 1, 1]
    return labels_N


def sample(
    labels_N: Any, arity: Arity, num: int, rng: np.random.Generator, **kwargs: Any
) -> IndexedConstraints:
    return (sample_triplets if arity == 3 else sample_pairs)(labels_N, num, rng, **kwargs)


def holds_any(stream: IndexedConstraints, exclude: NDArray[np.int64]) -> bool:
    forbidden = {frozenset(pair) for pair in exclude.tolist()}
    return any(
        frozenset(pair) in forbidden
        for row in stream.index_TC.tolist()
        for pair in itertools.combinations(row, 2)
    )


# References


@pytest.mark.parametrize("arity", [2, 3])
@pytest.mark.parametrize("seed", range(15))
def test_closure_equals_brute_force(seed: int, arity: Arity) -> None:
    labels_N = small_labels(seed, arity)
    num_seeds = int(generator(seed).integers(1, 4 if arity == 2 else 9)) * 2
    seeds = sample(labels_N, arity, num_seeds, generator(seed))
    expected = brute_closure(seeds)
    num = count_implied(seeds)
    assert num == len(expected)
    if num == 0:
        with pytest.raises(ValueError, match="imply 0 further"):
            close(seeds, 1, generator())
    else:
        assert as_set(close(seeds, num, generator(1))) == expected


def test_closure_of_odd_seeds_equals_brute_force() -> None:
    """Seeds that are there twice, the other way round, or with one row as two of their points."""
    for seeds in (
        triplets((3, 3, 9), (3, 5, 9), (3, 5, 9), (5, 3, 9), (9, 7, 3)),
        pairs([(4, 4), (4, 6), (6, 4), (6, 8)], [(8, 1), (1, 8), (1, 6)]),
        pairs([(0, 1), (1, 2), (2, 3)], []),
        pairs([], [(0, 1), (1, 2)]),
    ):
        expected = brute_closure(seeds)
        assert count_implied(seeds) == len(expected)
        if expected:
            assert as_set(close(seeds, len(expected), generator())) == expected


@pytest.mark.parametrize("arity", [2, 3])
def test_seeds_are_all_that_labels_allow(arity: Arity) -> None:
    for seed in range(5):
        labels_N = small_labels(seed, arity)
        rows = range(len(labels_N))
        if arity == 3:
            expected: set[tuple[Any, ...]] = {
                (a, p, n)
                for a, p, n in itertools.product(rows, repeat=3)
                if a != p and labels_N[a] == labels_N[p] != labels_N[n]
            }
            got = sample_triplets(labels_N, len(expected), generator())
        else:
            expected = {(i, j, bool(labels_N[i] == labels_N[j])) for i, j in itertools.combinations(rows, 2)}
            share = sum(similar for *_, similar in expected) / len(expected)
            got = sample_pairs(labels_N, len(expected), generator(), similar_share=share)
        assert as_set(got) == expected
        with pytest.raises(ValueError, match=r"these labels allow \d+ "):
            sample(labels_N, arity, 10 * len(expected), generator())


def test_half_of_the_pairs_are_similar_and_their_order_is_random() -> None:
    stream = sample_pairs(generator().integers(0, 5, 500), 2001, generator(), similar_share=0.25)
    assert stream.is_similar_T is not None
    assert stream.is_similar_T.sum() == 500
    assert 180 < stream.is_similar_T[:1000].sum() < 320


@pytest.mark.parametrize(
    "kind", ["seeds", "seeds without a pair", "implied", "similar pairs", "implied pairs"]
)
def test_draws_are_uniform(kind: str) -> None:
    """Every constraint is as often drawn as any other, and as often drawn first."""
    labels_N = np.array([0, 0, 0, 0, 1, 1, 2])
    seeds = sample_triplets(labels_N, 4, generator(5))
    chain = pairs([(0, 1), (1, 2), (2, 3), (4, 5)], [(0, 4), (1, 6)])
    draws: dict[str, Callable[[np.random.Generator], IndexedConstraints]] = {
        "seeds": lambda rng: sample_triplets(labels_N, 9, rng),
        "seeds without a pair": lambda rng: sample_triplets(labels_N, 9, rng, [[0, 1], [4, 2]]),
        "implied": lambda rng: close(seeds, 7, rng),
        "similar pairs": lambda rng: sample_pairs(labels_N, 3, rng, similar_share=1),
        "implied pairs": lambda rng: close(chain, 4, rng, similar_share=0),
    }
    rng = generator(11)
    drawn = [draws[kind](rng) for _ in range(600)]
    rows = np.stack([each.index_TC for each in drawn])
    for part in (rows[:, 0], rows.reshape(-1, rows.shape[-1])):
        _, counts = np.unique(
            np.sort(part, axis=1) if rows.shape[-1] == 2 else part, axis=0, return_counts=True
        )
        assert (
            len(counts)
            == {
                "seeds": 4 * 3 * 3 + 2 * 1 * 5,
                "seeds without a pair": 10 * 3 - 6 + 2 * 1 * 4,
                "implied": len(brute_closure(seeds)),
                "similar pairs": 6 + 1,
                "implied pairs": 4 * 2 + 4 - 2,
            }[kind]
        )
        assert chisquare(counts).pvalue > 1e-3


def test_five_thousand_seeds_imply_what_the_methods_note() -> None:
    """5,000 seeds imply, on 35,000 points of 10 classes some 60,400 further triplets, 5,000 of them mirrors."""
    counts = []
    for seed in range(6):
        rng = generator(seed)
        seeds = sample_triplets(rng.integers(0, 10, 35_000), 5000, rng)
        counts.append(count_implied(seeds))
    assert np.mean(counts) == pytest.approx(60_400, rel=0.05)
    implied = as_set(close(seeds, counts[-1], generator()))
    assert len(implied) == counts[-1]
    mirrors = {(p, a, n) for a, p, n in seeds.index_TC.tolist()}
    assert len(implied & mirrors) == 5000


def slow_one_pass(labels: list[str]) -> list[Triplet]:
    """The rule of online/README.md, word by word, with all that came before at hand."""
    found = []
    for x in range(1, len(labels)):
        seen = labels[:x]
        created = sorted(set(seen), key=seen.index)
        stored = {c: max(i for i in range(x) if labels[i] == c) for c in created}
        if labels[x] not in seen or len(created) < 2:
            continue
        if labels[x - 1] == labels[x]:
            latest = created[-1] if created[-1] != labels[x] else created[-2]
            found.append((x, x - 1, stored[latest]))
        else:
            found.append((x, stored[labels[x]], x - 1))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_one_pass_follows_the_rule(seed: int) -> None:
    rng = generator(seed)
    labels = [f"class {c}" for c in rng.integers(0, rng.integers(2, 8), 80)]
    got = list(one_pass_triplets(labels))
    assert got == slow_one_pass(labels)
    assert all(labels[a] == labels[p] != labels[n] and a > max(p, n) for a, p, n in got)


def test_one_pass_by_hand() -> None:
    assert list(one_pass_triplets("aabbabccab")) == [
        (3, 2, 1),
        (4, 1, 3),
        (5, 3, 4),
        (7, 6, 5),
        (8, 4, 7),
        (9, 5, 8),
    ]


def test_one_pass_is_lazy() -> None:
    stream = one_pass_triplets(itertools.cycle([0, 1, 2]))
    assert list(itertools.islice(stream, 2)) == [(3, 0, 2), (4, 1, 3)]
    labels_N = generator().integers(0, 3, 20)
    assert list(one_pass_triplets(labels_N)) == list(one_pass_triplets(labels_N.tolist()))


# Laws


@pytest.mark.parametrize("arity", [2, 3])
def test_a_stream_is_true_to_its_labels_and_repeats_nothing(arity: Arity) -> None:
    labels_N = generator(1).integers(0, 20, 2000)
    stream = stream_of(labels_N, arity, 1500, 900, rng=generator())
    assert len(as_set(stream)) == len(stream.index_TC) == 2400
    same_TC = labels_N[stream.index_TC[:, :1]] == labels_N[stream.index_TC[:, 1:]]
    if arity == 3:
        assert stream.is_similar_T is None
        assert same_TC.tolist() == [[True, False]] * 2400
    else:
        assert stream.is_similar_T is not None
        np.testing.assert_array_equal(stream.is_similar_T, same_TC[:, 0])
    assert all(len(set(row)) == arity for row in stream.index_TC.tolist())


@pytest.mark.parametrize("arity", [2, 3])
def test_seeds_come_first_then_what_they_imply(arity: Arity) -> None:
    labels_N = generator(2).integers(0, 4, 60)
    stream = stream_of(labels_N, arity, 30, 25, rng=generator())
    seeds, implied = (
        IndexedConstraints(
            stream.index_TC[part], None if stream.is_similar_T is None else stream.is_similar_T[part]
        )
        for part in (slice(30), slice(30, None))
    )
    assert as_set(seeds) == as_set(sample(labels_N, arity, 30, generator()))
    assert as_set(implied) <= brute_closure(seeds)
    only_seeds = stream_of(labels_N, arity, 30, 0, rng=generator())
    np.testing.assert_array_equal(only_seeds.index_TC, seeds.index_TC)


@pytest.mark.parametrize("arity", [2, 3])
def test_no_constraint_holds_an_excluded_pair(arity: Arity) -> None:
    labels_N = generator(3).integers(0, 3, 30)
    every = np.array(list(itertools.permutations(range(30), 2)))
    exclude = generator(4).choice(every, 120, replace=False)
    stream = stream_of(labels_N, arity, 60, 60, rng=generator(), exclude=exclude)
    assert not holds_any(stream, exclude)
    assert holds_any(stream_of(labels_N, arity, 60, 60, rng=generator()), exclude)
    assert len(as_set(stream)) == 120


@pytest.mark.parametrize("arity", [2, 3])
def test_class_names_do_not_matter(arity: Arity) -> None:
    labels_N = generator(5).integers(0, 6, 400)
    names = np.array(["f", "b", "e", "a", "d", "c"])
    streams = [stream_of(each, arity, 300, 100, rng=generator()) for each in (labels_N, names[labels_N])]
    np.testing.assert_array_equal(streams[0].index_TC, streams[1].index_TC)


@pytest.mark.parametrize("arity", [2, 3])
def test_the_same_seed_gives_the_same_stream(arity: Arity) -> None:
    labels_N = generator(6).integers(0, 6, 400)
    exclude = generator(7).integers(0, 400, (500, 2))

    def stream(seed: int) -> list[Any]:
        return stream_of(labels_N, arity, 300, 100, rng=generator(seed), exclude=exclude).index_TC.tolist()

    assert stream(1) == stream(1)
    assert stream(1) != stream(2)


def test_the_kind_of_pair_that_is_implied_more_makes_up_for_the_other() -> None:
    chain = pairs([(0, 1), (1, 2), (2, 3)], [(0, 9), (9, 4)])  # implies 3 similar and 3 dissimilar pairs
    star = pairs([(0, i) for i in range(1, 6)], [(0, 9)])  # implies 10 and 5

    def num_similar(seeds: IndexedConstraints, num: int, **kwargs: Any) -> int:
        flags = close(seeds, num, generator(), **kwargs).is_similar_T
        assert flags is not None
        assert len(flags) == num
        return int(flags.sum())

    assert num_similar(chain, 4) == 2
    assert num_similar(chain, 4, similar_share=1.0) == 3
    assert num_similar(chain, 4, similar_share=0.0) == 1
    assert num_similar(star, 10) == 5
    assert num_similar(star, 14) == 9
    assert num_similar(star, 12, exclude=[[1, 9], [9, 2], [1, 2]]) == 9


def test_many_constraints_are_numbered_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """1.6e16 triplets, more than a float64 tells apart."""
    labels_N = generator().integers(0, 2, 400_000)
    stream = stream_of(labels_N, 3, 1000, 1000, rng=generator())
    assert len(as_set(stream)) == 2000
    same_TC = labels_N[stream.index_TC[:, :1]] == labels_N[stream.index_TC[:, 1:]]
    assert same_TC.tolist() == [[True, False]] * 2000
    monkeypatch.setattr(enumeration, "LIMIT", 2**50)
    with pytest.raises(ValueError, match="draw from fewer rows"):
        sample_triplets(labels_N, 1, generator())


# Blocks


def test_blocks_of_rows_are_the_rows_in_float64() -> None:
    x_ND = generator().normal(size=(50, 3)).astype(np.float32)
    labels_N = np.arange(50) % 4
    for draw, arity in ((sample_triplets, 3), (sample_pairs, 2)):
        stream = draw(labels_N, 10, generator())
        got = list(stream.blocks(x_ND, 4))
        assert [block.x_BCD.shape for block in got] == [(4, arity, 3), (4, arity, 3), (2, arity, 3)]
        assert all(block.x_BCD.dtype == np.float64 for block in got)
        np.testing.assert_array_equal(np.concatenate([b.x_BCD for b in got]), x_ND[stream.index_TC])
        if stream.is_similar_T is None:
            assert all(block.is_similar_B is None for block in got)
        else:
            flags = [block.is_similar_B for block in got if block.is_similar_B is not None]
            np.testing.assert_array_equal(np.concatenate(flags), stream.is_similar_T)


def test_blocks_of_rows_complain_at_once() -> None:
    x_ND = np.zeros((5, 2))
    with pytest.raises(ValueError, match=r"constraint 1 names the rows \[1, 2, 5\]; x has the rows 0 to 4"):
        triplets((0, 1, 2), (1, 2, 5)).blocks(x_ND, 2)
    with pytest.raises(ValueError, match=r"constraint 0 names the rows \[-1, 1, 2\]"):
        triplets((-1, 1, 2)).blocks(x_ND, 2)
    with pytest.raises(ValueError, match="size=0"):
        triplets((0, 1, 2)).blocks(x_ND, 0)
    with pytest.raises(ValueError, match="the stream is empty"):
        IndexedConstraints(np.empty((0, 3), np.int64)).blocks(x_ND, 2)


def test_blocks_of_an_endless_iterator_take_no_more_than_they_give() -> None:
    taken = itertools.count()

    def endless() -> Iterator[Single]:
        for number in taken:
            yield np.full(2, number, np.float32), [number, 1.0], [0, number]

    stream = blocks(endless(), 3)
    first, second = next(stream), next(stream)
    assert next(taken) == 6
    assert first.x_BCD.dtype == np.float64
    assert first.is_similar_B is None
    np.testing.assert_array_equal(second.x_BCD[0], [[3, 3], [3, 1], [0, 3]])


def test_blocks_of_single_pairs() -> None:
    x_D = np.arange(4.0)
    flags = [True, np.False_, 1, np.int64(0), 1.0]
    got = list(blocks(((x_D + i, x_D - i, flag) for i, flag in enumerate(flags)), 2))
    assert [len(block.x_BCD) for block in got] == [2, 2, 1]
    assert [block.is_similar_B.tolist() for block in got if block.is_similar_B is not None] == [
        [True, False],
        [True, False],
        [True],
    ]
    np.testing.assert_array_equal(got[1].x_BCD[0], [x_D + 2, x_D - 2])


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        ((np.zeros(2), np.zeros(2), np.zeros(3)), r"constraint 4 .* shapes \(2,\), \(2,\), \(3,\)"),
        ((np.zeros(2), np.zeros(2), True), "constraint 4 of the stream has parts"),
        ((np.zeros(2), np.zeros(2)), "constraint 4 of the stream has parts"),
        ((np.zeros((2, 1)), np.zeros((2, 1)), np.zeros((2, 1))), "constraint 4 of the stream has parts"),
    ],
)
def test_a_single_constraint_that_is_none_is_named(bad: Any, complaint: str) -> None:
    good = (np.zeros(2), np.ones(2), np.ones(2))
    stream = blocks([*[good] * 4, bad, good], 3)
    next(stream)
    with pytest.raises(ValueError, match=complaint):
        next(stream)


def test_singles_of_the_first_block_are_named_too() -> None:
    with pytest.raises(ValueError, match="constraint 0 of the stream: similar is -1, expected true or false"):
        next(blocks([(np.zeros(2), np.ones(2), -1)], 3))
    with pytest.raises(ValueError, match="constraint 0 of the stream has parts"):
        next(blocks([(1.0, 2.0, True)], 3))
    with pytest.raises(ValueError, match="the stream is empty"):
        next(blocks([], 3))
    with pytest.raises(ValueError, match="size=0"):
        blocks([], 0)


# Files


def write(path: Path, columns: dict[str, list[Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.table(columns), path)
    else:
        lines = [columns, *zip(*columns.values(), strict=True)]
        path.write_text("".join(",".join("" if v is None else str(v) for v in line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_constraints_come_back_from_files(tmp_path: Path, suffix: str) -> None:
    rows: list[list[Any]] = [[3, 1, 4], [1, 5, 9], [2, 6, 5]]
    path = write(
        tmp_path / f"t.{suffix}",
        {"note": ["x", "y", "z"], "anchor": rows[0], "positive": rows[1], "negative": rows[2]},
    )
    got = read_constraints(path, num_rows=10)
    assert got.index_TC.dtype == np.int64
    assert got.index_TC.T.tolist() == rows
    assert got.is_similar_T is None
    for flags in ([1, 0, 1], [True, False, True], ["true", "FALSE", "1"], [1.0, 0.0, 1.0]):
        path = write(tmp_path / f"p.{suffix}", {"first": rows[0], "second": rows[1], "similar": flags})
        pair = read_constraints(str(path))
        assert pair.index_TC.T.tolist() == rows[:2]
        assert pair.is_similar_T is not None
        assert pair.is_similar_T.dtype == np.bool_
        assert pair.is_similar_T.tolist() == [True, False, True]


def test_whole_numbers_that_a_table_wrote_as_floats_are_rows(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("anchor, positive ,negative\n1,2.0,3\n4.0,5,6\n")
    assert read_constraints(tmp_path / "t.csv").index_TC.tolist() == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize(
    ("value", "shown"),
    [("x", "'x'"), (-1, "-1"), (7, "7"), (1.5, "1.5"), (None, "missing")],
)
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_value_that_is_no_row_is_named(tmp_path: Path, suffix: str, value: Any, shown: str) -> None:
    positive = ["1", value] if isinstance(value, str) else [1, value]
    path = write(tmp_path / f"t.{suffix}", {"anchor": [0, 1], "positive": positive, "negative": [5, 6]})
    place = "line 3" if suffix == "csv" else "row 1"
    with pytest.raises(
        ValueError, match=rf"t.{suffix}, {place}: positive is '?{shown}'?; give a row number from 0 to 6"
    ):
        read_constraints(path, num_rows=7)


def test_columns_of_another_type_are_no_rows(tmp_path: Path) -> None:
    for positive, shown in (([True, False], "True"), ([[1.0], [2.0]], "array")):
        path = write(tmp_path / "t.parquet", {"anchor": [0, 1], "positive": positive, "negative": [5, 6]})
        with pytest.raises(
            ValueError, match=rf"t.parquet, row 0: positive is {shown}.*; give a row number from 0,"
        ):
            read_constraints(path)


def test_lines_are_counted_with_empty_ones(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("\nfirst,second,similar\n1,2,true\n\n\n3,4,yes\n")
    with pytest.raises(ValueError, match=r"p.csv, line 6: similar is 'yes'; give 1 or true"):
        read_constraints(tmp_path / "p.csv")
    (tmp_path / "p.csv").write_text("first,second,similar\n1,2,1\n1,3,\n")
    with pytest.raises(ValueError, match=r"p.csv, line 3: similar is missing"):
        read_constraints(tmp_path / "p.csv")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "no such file"),
        ("", r"c.csv: not a readable table \(Empty CSV file\)"),
        ("anchor,positive,negative\n", "c.csv: no constraints below its header"),
        ("anchor,positive\n1,2\n", "needs either the columns .*; it has anchor, positive"),
        ("anchor,positive,negative,first,second,similar\n1,2,3,4,5,1\n", "needs either the columns"),
        (
            "anchor,positive,negative\n1,2,3\n4,5\n",
            r"c.csv: not a readable table .*Expected 3 columns, got 2: 4,5",
        ),
    ],
)
def test_a_file_that_holds_no_constraints_is_named(
    tmp_path: Path, content: str | None, complaint: str
) -> None:
    if content is not None:
        (tmp_path / "c.csv").write_text(content)
    with pytest.raises(ValueError, match=complaint):
        read_constraints(tmp_path / "c.csv")


# Errors


@pytest.mark.parametrize(
    ("draw", "complaint"),
    [
        (
            lambda rng: sample_triplets([1, 1, 1], 1, rng),
            "all labels are of one class; triplets need a second",
        ),
        (lambda rng: sample_triplets([1, 2, 3], 1, rng), "no class has two rows; triplets need"),
        (lambda rng: sample_triplets([1, 1, 2], 3, rng), "these labels allow 2 triplets; 3 are asked for"),
        (lambda rng: sample_triplets([], 1, rng), "expected one label for each of the rows"),
        (lambda rng: sample_triplets([[1], [2]], 1, rng), "expected one label for each of the rows"),
        (lambda rng: sample_triplets([1, 1, 2], 0, rng), "num=0 must be at least 1"),
        (lambda rng: sample_pairs([1, 1, 2], 0, rng), "num=0 must be at least 1"),
        (lambda rng: sample_pairs([1, 1, 1], 2, rng), "all labels are of one class.*similar_share=1"),
        (lambda rng: sample_pairs([1, 2, 3], 2, rng), "no class has two rows.*similar_share=0"),
        (lambda rng: sample_pairs([1, 1, 2], 4, rng), "these labels allow 1 similar pairs; 2 are asked for"),
        (
            lambda rng: sample_pairs([1, 1, 2], 2, rng, similar_share=1.5),
            r"similar_share=1.5 must be in \[0, 1\]",
        ),
        (lambda rng: close(triplets((0, 1, 2)), 0, rng), "num=0 must be at least 1"),
        (lambda rng: close(triplets((0, 1, 2)), 2, rng), "1 seeds imply 1 further constraints; num=2"),
        (lambda rng: close(pairs([(0, 1)], [(1, 2)]), 2, rng), "2 seeds imply 1 further constraints; num=2"),
        (lambda rng: close(IndexedConstraints(np.empty((0, 3), int)), 1, rng), "no seeds"),
        (
            lambda rng: close(IndexedConstraints(np.zeros((4, 2), int)), 1, rng),
            r"seeds have the shape \(4, 2\)",
        ),
        (
            lambda rng: close(triplets((0, 1, 2), (1, 3, 7), (7, 8, 2), (8, 3, 2)), 1, rng),
            "rows 1 and 7 are dissim",
        ),
        (lambda rng: close(triplets((0, 1, 1)), 1, rng), "rows 0 and 1 are dissimilar"),
        (
            lambda rng: close(pairs([(20, 9), (9, 4)], [(1, 2), (4, 20)]), 1, rng),
            "rows 4 and 20 are dissimilar",
        ),
        (lambda rng: close(pairs([], [(5, 5)]), 1, rng), "rows 5 and 5 are dissimilar"),
        (lambda rng: stream_of([1, 1, 2], 4, rng=rng), "arity=4: choose 3 for triplets or 2 for pairs"),  # type: ignore[arg-type]
        (lambda rng: stream_of([1, 1, 2], 3, 0, rng=rng), "num=0 must be at least 1"),
        (lambda rng: stream_of([1, 1, 2], 3, 1, -1, rng=rng), "num_implied=-1"),
        (
            lambda rng: stream_of([1, 1, 2], 3, 1, 1, rng=rng, exclude=[[0, 3]]),
            "exclude names row 3; .* 3 rows",
        ),
        (lambda rng: sample_pairs([1, 1, 2], 1, rng, exclude=[0, 1]), r"exclude is int64 of shape \(2,\)"),
        (lambda rng: sample_pairs([1, 1, 2], 1, rng, exclude=[[0, 1.5]]), "exclude is float64"),
        (lambda rng: sample_pairs([1, 1, 2], 1, rng, exclude=[[0, -1]]), "give pairs of row numbers from 0"),
    ],
)
def test_errors_say_what_to_mend(draw: Callable[[np.random.Generator], object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        draw(generator())


@pytest.mark.parametrize("labels", ["", "aaaa", "abcd", "aab"])
def test_labels_without_a_triplet_are_an_error(labels: str) -> None:
    with pytest.raises(ValueError, match="no triplet: labels need two classes"):
        list(one_pass_triplets(labels))


def test_exclusion_that_leaves_too_few_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    labels_N = np.array([0, 0, 0, 1, 1])
    crossing = [[i, j] for i in range(3) for j in (4, 3)]
    with pytest.raises(ValueError, match="only 0 triplets hold no pair of exclude; num=2"):
        sample_triplets(labels_N, 2, generator(), crossing)
    with pytest.raises(ValueError, match="only 1 dissimilar pairs hold no pair of exclude; num=2"):
        sample_pairs(labels_N, 4, generator(), crossing[1:])
    with pytest.raises(ValueError, match="only 0 implied constraints hold no pair of exclude; num=1"):
        close(triplets((0, 1, 3)), 1, generator(), [[1, 3]])
    every = [list(pair) for pair in itertools.combinations(range(60), 2)]
    monkeypatch.setattr(enumeration, "TRIES", 1000)
    with pytest.raises(
        ValueError, match=r"of \d{4} constraints drawn 0 hold no pair of exclude; 2 are asked for"
    ):
        sample_triplets(np.arange(60) % 2, 2, generator(), every)


def test_scarce_constraints_are_found_all() -> None:
    """Excluded are all pairs of 60 rows but those of two triplets."""
    left = {frozenset(pair) for row in ((0, 2, 1), (4, 6, 3)) for pair in itertools.combinations(row, 2)}
    every = [list(pair) for pair in itertools.combinations(range(60), 2) if frozenset(pair) not in left]
    found = sample_triplets(np.arange(60) % 2, 4, generator(), every)
    assert as_set(found) == {(0, 2, 1), (2, 0, 1), (4, 6, 3), (6, 4, 3)}


def test_nothing_else_is_excluded() -> None:
    found = sample_pairs(np.zeros(9), 35, generator(), [[2, 1]], similar_share=1)
    assert {row[:2] for row in as_set(found)} == set(itertools.combinations(range(9), 2)) - {(1, 2)}
