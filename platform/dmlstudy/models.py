"""Models for Python: load one of a store or a folder, and use it as the commands of the same names do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

if TYPE_CHECKING:
    from dmlstudy.saved import Model
    from dmlstudy.serving.gallery import Gallery, IndexKind
    from dmlstudy.serving.server import BackgroundServer
    from dmlstudy.serving.short_search import Beside


def load(
    model: str | Path, *, store: str | Path | None = None, device: str = "auto", batch_size: int = 256
) -> Model:
    """A model that embeds arrays and files: a folder that was pulled, or NAME, NAME@ALIAS or NAME/VERSION of a store.

    ``store`` is by default DMLSTUDY_STORE, or the folder dmlstudy_store. ``device`` 'auto' is a GPU if there is one.
    Every file is checked against its SHA-256 first. Raises ValueError naming the file at fault, or the model that is
    not there.
    """
    from dmlstudy import saved

    if saved.is_model(model):
        opened = saved.Model.open(model, device=device, batch_size=batch_size)
        _ = opened.loaded  # what is wrong with it is told here, not where something is embedded
        return opened
    from dmlstudy.interface import store_at
    from dmlstudy.registry.models import fetched

    with fetched(store_at(store), str(model), device=device, batch_size=batch_size) as opened:
        return opened


def pull(
    model: str,
    to: str | Path,
    *,
    store: str | Path | None = None,
    replace: bool = False,
    device: str = "auto",
) -> Model:
    """Copy a registered model into a new folder, verified, and open it there.

    With ``replace`` a model that is there already is replaced in one step. Raises ValueError where the folder is
    there, the model is not, or a file is not what was registered.
    """
    from dmlstudy.interface import store_at
    from dmlstudy.registry import models

    folder = Path(to).expanduser()
    models.pull(store_at(store), model, folder, replace=replace)
    return load(folder, device=device)


def embed(
    model: Model, items: str | Path, output: str | Path, *, size: int | None = None, bits: int = 32
) -> Path:
    """Embed a folder, a file or a table into a Parquet file with the columns id, label and embedding.

    Parts that an interrupted call has left are not made again. ``size`` and ``bits`` ask for a short form.
    Raises ValueError naming the file at fault, and for an output that may not be replaced.
    """
    from dmlstudy.serving.embed import EmbedJob, embed_into

    written = Path(output).expanduser()
    embed_into(EmbedJob.of(model, Path(items).expanduser(), written, size=size, bits=bits))
    return written


def index(
    embeddings: str | Path,
    folder: str | Path,
    kind: IndexKind = "flat",
    *,
    size: int | None = None,
    bits: int | None = None,
    beside: Beside | None = None,
) -> Gallery:
    """Make a gallery of a file that ``embed`` wrote, in a new folder, to be searched by ``retrieve`` and ``serve``.

    ``kind`` is flat (exact), ivf, ivf_pq or hnsw. ``size`` and ``bits`` are of the vectors that are searched,
    ``beside`` says which put in order what these find. Raises ValueError for a folder that is there, and a file that
    is none of embeddings.
    """
    from dmlstudy.serving.gallery import build

    return build(embeddings, Path(folder).expanduser(), kind, size=size, bits=bits, beside=beside)


def retrieve(model: Model, gallery: Gallery | str | Path, queries: str | Path, k: int = 10) -> pd.DataFrame:
    """The k nearest items of a gallery for each query: a row for each, with query, rank, item, label and distance.

    ``queries`` is a picture, a folder or anything else that ``embed`` takes. ``score`` is larger for what is nearer;
    ``accept`` is missing where the model has no threshold. Raises ValueError for a gallery of another model.
    """
    from dmlstudy.saved.items import of_files
    from dmlstudy.serving.gallery import Gallery, open_gallery
    from dmlstudy.serving.retrieve import Hit
    from dmlstudy.serving.retrieve import retrieve as find
    from dmlstudy.serving.retriever import Retriever

    opened = gallery if isinstance(gallery, Gallery) else open_gallery(gallery, device=model.device)
    hits = find(Retriever(model, opened), of_files(model, Path(queries).expanduser()), k)
    rows = [hit.model_dump(exclude={"place"}) for own in hits for hit in own]
    frame = pd.DataFrame(rows, columns=[name for name in Hit.model_fields if name != "place"])
    return frame.rename(columns={"id": "item"}).astype({"accept": "boolean"})


def serve(model: Model, gallery: str | Path | None = None, *, port: int = 0) -> BackgroundServer:
    """Put a model, and a gallery, behind HTTP in a thread of this process: POST /embed and /retrieve.

    It answers this machine alone, at ``url``, until ``close()``; it is a context manager too. Port 0 is a free one.
    ``dmlstudy serve`` is for others. Raises ValueError for a port that is taken, and a gallery of another model.
    """
    from dmlstudy.serving.guards import Limits
    from dmlstudy.serving.server import BackgroundServer, Service

    return BackgroundServer(Service(model, gallery, Limits()), port)
