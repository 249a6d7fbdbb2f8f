"""Data sets, class-disjoint splits, batches, views, embeddings on disk, trials' state: the only door to pyarrow."""

from dmlstudy.data.augmentation import Augmentation, check_augmentation
from dmlstudy.data.batches import Batches, PKBatches, RandomBatches, TwoDraws
from dmlstudy.data.canvas import remove_unused
from dmlstudy.data.datasets import DATASETS, has_parquet, load
from dmlstudy.data.decoding import AS_BEFORE, DamagedImage, Reading, UnsuitableImage
from dmlstudy.data.folds import Fold, RowFold, class_disjoint_folds, row_folds
from dmlstudy.data.images import Fit, ImageSet, LabelledImages, ZeroShotData
from dmlstudy.data.inputs import Inputs, decode_images, open_images, open_vectors
from dmlstudy.data.layouts import EXPECTED, EXPECTED_CLOSED, PartSize
from dmlstudy.data.lfw import LFW, load_lfw
from dmlstudy.data.loader import Loader, pinned
from dmlstudy.data.parquet import (
    EMBEDDING_COLUMNS,
    Column,
    check_table_output,
    embeddings_left_out,
    embeddings_origin,
    fold_scores_as_bytes,
    join_embeddings,
    pair_counts_as_bytes,
    read_embeddings,
    read_fold_scores,
    read_items,
    read_pair_counts,
    read_unit_scores,
    read_verdict_scores,
    unit_scores_as_bytes,
    verdict_scores_as_bytes,
    write_embeddings,
    write_items,
    write_table,
)
from dmlstudy.data.pictures import LazyImages, prepare
from dmlstudy.data.remarks import check_hits, remarks
from dmlstudy.data.same_files import files_digest
from dmlstudy.data.seen_classes import CLOSED, ClosedSet, as_features, load_closed
from dmlstudy.data.source import Source
from dmlstudy.data.tables import Features, load_features
from dmlstudy.data.view_ops import check_channels, fill_for

__all__ = [
    "AS_BEFORE",
    "CLOSED",
    "DATASETS",
    "EMBEDDING_COLUMNS",
    "EXPECTED",
    "EXPECTED_CLOSED",
    "LFW",
    "Augmentation",
    "Batches",
    "ClosedSet",
    "Column",
    "DamagedImage",
    "Features",
    "Fit",
    "Fold",
    "ImageSet",
    "Inputs",
    "LabelledImages",
    "LazyImages",
    "Loader",
    "PKBatches",
    "PartSize",
    "RandomBatches",
    "Reading",
    "RowFold",
    "Source",
    "TwoDraws",
    "UnsuitableImage",
    "ZeroShotData",
    "as_features",
    "check_augmentation",
    "check_channels",
    "check_hits",
    "check_table_output",
    "class_disjoint_folds",
    "decode_images",
    "embeddings_left_out",
    "embeddings_origin",
    "files_digest",
    "fill_for",
    "fold_scores_as_bytes",
    "has_parquet",
    "join_embeddings",
    "load",
    "load_closed",
    "load_features",
    "load_lfw",
    "open_images",
    "open_vectors",
    "pair_counts_as_bytes",
    "pinned",
    "prepare",
    "read_embeddings",
    "read_fold_scores",
    "read_items",
    "read_pair_counts",
    "read_unit_scores",
    "read_verdict_scores",
    "remarks",
    "remove_unused",
    "row_folds",
    "unit_scores_as_bytes",
    "verdict_scores_as_bytes",
    "write_embeddings",
    "write_items",
    "write_table",
]
