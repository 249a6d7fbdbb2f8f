"""Other stores take the file that ``embed`` writes, by the README's own samples, and find the same neighbours."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from support.postgres import running_postgres

from dmlstudy import retrieval
from dmlstudy.serving.embed import EmbedJob, embed_into

README = Path(__file__).resolve().parents[2] / "platform" / "dmlstudy" / "serving" / "README.md"
STORES = ("Qdrant", "LanceDB", "DuckDB", "pgvector")


def samples() -> dict[str, str]:
    """The README's samples by the store; under an empty name what they begin with."""
    text = README.read_text(encoding="utf-8")
    section = re.split(r"^## ", text.partition("## Elsewhere")[2], flags=re.MULTILINE)[0]
    found = re.findall(r"(?:\*\*(\w+)\*\*[^`*]*(?:`[^`]*`[^`*]*)*)?```python\n(.*?)```", section, re.DOTALL)
    return dict(found)


def test_the_readme_has_a_sample_for_each_store() -> None:
    assert samples().keys() == {"", *STORES}


@pytest.fixture
def url() -> Iterator[str]:
    """An empty database on loopback."""
    with running_postgres() as address:
        yield f"postgresql://{address}"


@pytest.fixture
def embedded(
    models: dict[str, Path], pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> pd.DataFrame:
    """The table of ``embeddings.parquet``, which lies in the working folder."""
    monkeypatch.chdir(tmp_path)
    own = EmbedJob(str(models["plain"]), str(pictures), "embeddings.parquet", 8, "cpu")
    embed_into(own)
    return pd.read_parquet("embeddings.parquet")


@pytest.mark.parametrize("store", STORES)
@pytest.mark.filterwarnings("ignore")
def test_a_store_finds_the_same_neighbours(
    store: str, embedded: pd.DataFrame, request: pytest.FixtureRequest
) -> None:
    vectors = np.stack(embedded["embedding"])
    query = np.random.default_rng(4).normal(size=(1, vectors.shape[1])).astype(np.float32)
    query /= np.linalg.norm(query)
    index_QK, _ = retrieval.retrieve(query, vectors, 10)
    names: dict[str, Any] = {"query": query[0]}
    if store == "pgvector":
        names["url"] = request.getfixturevalue("url")
    exec(samples()[""] + samples()[store], names)
    assert names["found"] == embedded["id"].iloc[index_QK[0]].tolist()
