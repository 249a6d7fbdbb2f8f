"""Metrics learned from a stream of constraints, one at a time: OAHU, and linear learners beside it."""

from dmlstudy.online import constraint_files, constraints
from dmlstudy.online.applications import (
    are_similar,
    candidates,
    classify,
    dissimilarity,
    judged,
    retrieve_distinct,
    roc_auc,
)
from dmlstudy.online.catalogue import LEARNERS, build, parameters_of
from dmlstudy.online.drift import CanReopen
from dmlstudy.online.folder import Learned, load, save
from dmlstudy.online.learner import Constraints, Counts, OnlineLearner
from dmlstudy.online.oahu import OAHU
from dmlstudy.online.preparation import SCALINGS, Preparation
from dmlstudy.online.prequential import Prequential
from dmlstudy.online.stream import Moment, learn
from dmlstudy.online.verification import Verified, verify, verify_on

__all__ = [
    "LEARNERS",
    "OAHU",
    "SCALINGS",
    "CanReopen",
    "Constraints",
    "Counts",
    "Learned",
    "Moment",
    "OnlineLearner",
    "Preparation",
    "Prequential",
    "Verified",
    "are_similar",
    "build",
    "candidates",
    "classify",
    "constraint_files",
    "constraints",
    "dissimilarity",
    "judged",
    "learn",
    "load",
    "parameters_of",
    "retrieve_distinct",
    "roc_auc",
    "save",
    "verify",
    "verify_on",
]
