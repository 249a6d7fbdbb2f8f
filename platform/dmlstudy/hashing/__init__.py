"""Unsupervised hashing of frozen features: four methods, each with or without structure embeddings (NASA)."""

from dmlstudy.hashing.evaluation import METRICS, evaluate, evaluate_codes, means, metrics_at, rank_codes
from dmlstudy.hashing.folder import load, save
from dmlstudy.hashing.methods import METHODS
from dmlstudy.hashing.model import HashingModel, build
from dmlstudy.hashing.ranking import PointRanking
from dmlstudy.hashing.trainer import HashingFailed, HashingTrainer, check_training, train_hashing

__all__ = [
    "METHODS",
    "METRICS",
    "HashingFailed",
    "HashingModel",
    "HashingTrainer",
    "PointRanking",
    "build",
    "check_training",
    "evaluate",
    "evaluate_codes",
    "load",
    "means",
    "metrics_at",
    "rank_codes",
    "save",
    "train_hashing",
]
