"""Data sets, class-disjoint splits, PK batches, embeddings on disk, trials' state: the only door to pyarrow."""

from dmlstudy.data.batches import PKBatches
from dmlstudy.data.datasets import DATASETS, load, load_images
from dmlstudy.data.folds import Fold, class_disjoint_folds
from dmlstudy.data.images import ImageSet, ZeroShotData
from dmlstudy.data.parquet import read_embeddings, write_embeddings

__all__ = [
    "DATASETS",
    "Fold",
    "ImageSet",
    "PKBatches",
    "ZeroShotData",
    "class_disjoint_folds",
    "load",
    "load_images",
    "read_embeddings",
    "write_embeddings",
]
