"""``protocol.retention``: data beside the study's own, on which a verdict's models are scored as well.

What fine-tuning gains in its own domain it may lose elsewhere. The retention data take no part in the search, nor in
the choice of a winner.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import SerializerFunctionWrapHandler, model_serializer

from dmlstudy.records import DataConfig

KEY = "protocol.retention"

OWN = ("name", "path")
"""Keys that the study's section ``data`` never lends."""

VECTORS = "features"
"""The data set that has no pictures, so that no settings of pictures are lent to it."""

_DATA_KEY = re.compile(rf"(?<![\w./])data\.(?=(?:{'|'.join(DataConfig.model_fields)})\b)")


class RetentionConfig(DataConfig):
    """Data in the form of the section ``data``; what is not said here is as it is said there."""

    @model_serializer(mode="wrap")
    def _without_later_keys(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write what was said alone: at its default a key means that default, and not the study's."""
        values: dict[str, Any] = write(self)
        return {key: value for key, value in values.items() if key in self.model_fields_set}

    def lent(self) -> set[str]:
        """Keys that are the study's, for they are not said here."""
        if self.name == VECTORS:
            return set()
        return DataConfig.model_fields.keys() - {*OWN, *self.model_fields_set}

    def settled(self, study: DataConfig, path: str | None) -> DataConfig:
        """The data as they are loaded, at this ``path``, beside those of the study."""
        own = {name: getattr(self, name) for name in DataConfig.model_fields}
        lent = {name: getattr(study, name) for name in self.lent()}
        return DataConfig(**{**own, **lent, "path": path})

    def told(self, error: ValueError) -> str:
        """An error of loading these data, which names the keys of a section ``data``, by their keys here."""
        text = _DATA_KEY.sub(f"{KEY}.", str(error))
        text = text if text.startswith(KEY) else f"{KEY}: {text}"
        named = re.match(rf"{re.escape(KEY)}\.(\w+)", text)
        if named is None or named[1] not in self.lent():
            return text
        return f"{text} (it is that of data.{named[1]}, unless {KEY}.{named[1]} is given; null is none)"
