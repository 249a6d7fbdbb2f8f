"""Writes the quickstart's pictures: a part of Omniglot, which the repository keeps in search_spaces/characters.

    python jobs/characters.py /where/omniglot/lies search_spaces/characters

Omniglot (B. M. Lake, R. Salakhutdinov, J. B. Tenenbaum: Human-level concept learning through probabilistic program
induction, Science 350, 2015; MIT licence) is given as train.parquet, its background characters, and test.parquet, its
evaluation characters, in the Hugging Face layout. Of each so many characters are drawn; their 20 drawings become 28x28
pixels of 16 shades. The same Omniglot gives the same files, byte for byte with the same Pillow and pyarrow.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

NUM_CHARACTERS = {"train": 200, "test": 100}
SIDE, SHADES = 28, 16


def small(png: bytes) -> bytes:
    """A drawing of 105x105 pixels as a grey PNG of 28x28 with 16 shades."""
    with Image.open(io.BytesIO(png)) as drawing:
        pixels = np.asarray(drawing.convert("L").resize((SIDE, SIDE), Image.Resampling.BOX))
    shades = np.round(pixels / 255 * (SHADES - 1)) * (255 // (SHADES - 1))
    content = io.BytesIO()
    Image.fromarray(shades.astype(np.uint8)).save(content, "PNG", optimize=True)
    return content.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("omniglot", type=Path, help="The folder with train.parquet and test.parquet.")
    parser.add_argument("output", type=Path, help="The folder to write the two smaller files into.")
    options = parser.parse_args()
    generator = np.random.default_rng(0)
    for side, count in NUM_CHARACTERS.items():
        table = pq.read_table(options.omniglot / f"{side}.parquet")
        labels = table["label"].to_numpy()
        drawn = np.sort(generator.choice(np.unique(labels), count, replace=False))
        rows = np.flatnonzero(np.isin(labels, drawn))
        pictures = [
            {"bytes": small(each["bytes"]), "path": each["path"]}
            for each in table["image"].take(rows).to_pylist()
        ]
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        written = pa.table({"image": pa.array(pictures, kind), "label": pa.array(labels[rows])})
        pq.write_table(written, options.output / f"{side}.parquet", compression="zstd", use_dictionary=False)


if __name__ == "__main__":
    main()
