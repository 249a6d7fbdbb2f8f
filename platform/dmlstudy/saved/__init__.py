"""Saved models, whatever their kind: ``Model.open`` verifies a folder and makes one value of it."""

from dmlstudy.saved.model import KINDS, Model, Takes, is_model

__all__ = ["KINDS", "Model", "Takes", "is_model"]
