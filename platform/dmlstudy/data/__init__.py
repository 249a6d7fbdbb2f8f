"""Data sets, class-disjoint splits, batches, views, embeddings on disk, trials' state: the only door to pyarrow."""

from dmlstudy.data.augmentation import Augmentation, check_augmentation
from dmlstudy.data.batches import Batches, PKBatches, RandomBatches, TwoDraws
from dmlstudy.data.closed import CLOSED, ClosedSet, as_features, load_closed
from dmlstudy.data.datasets import DATASETS, load, load_images
from dmlstudy.data.folds import Fold, RowFold, class_disjoint_folds, row_folds
from dmlstudy.data.images import ImageSet, LabelledImages, ZeroShotData
from dmlstudy.data.layouts import EXPECTED, EXPECTED_CLOSED, Counts
from dmlstudy.data.loader import Loader
from dmlstudy.data.parquet import read_embeddings, write_embeddings
from dmlstudy.data.pictures import LazyImages
from dmlstudy.data.tables import Features, load_features

__all__ = [
    "CLOSED",
    "DATASETS",
    "EXPECTED",
    "EXPECTED_CLOSED",
    "Augmentation",
    "Batches",
    "ClosedSet",
    "Counts",
    "Features",
    "Fold",
    "ImageSet",
    "LabelledImages",
    "LazyImages",
    "Loader",
    "PKBatches",
    "RandomBatches",
    "RowFold",
    "TwoDraws",
    "ZeroShotData",
    "as_features",
    "check_augmentation",
    "class_disjoint_folds",
    "load",
    "load_closed",
    "load_features",
    "load_images",
    "read_embeddings",
    "row_folds",
    "write_embeddings",
]
