"""An embedder as files that timm and transformers read: config.json and model.safetensors.

``timm.create_model("local-dir:FOLDER", pretrained=True)``, or ``hf-hub:OWNER/REPOSITORY`` of a hub, and
``transformers.AutoImageProcessor.from_pretrained``, whose processor of timm models resizes with Pillow as timm does.

Shapes: N images, C channels, H height, W width, D embedding size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch.nn import functional as F

from dmlstudy.data import Fit
from dmlstudy.embedders import Embedder, full_float32
from dmlstudy.embedders.timm_twin import TimmTwin, read

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def preprocessing(fit: Fit, embedder: Embedder) -> dict[str, Any]:
    """The way from an RGB picture to normalised pixels, in timm's words.

    Raises ValueError for a way that timm's evaluation transform cannot go.
    """
    height, width = embedder.architecture.image_size
    to, crop, percent = fit.resize_to, "squash", 1.0
    if to is not None:
        if height != width:
            raise ValueError(f"timm has no words for pictures resized to {to} and cut to {height} x {width}")
        crop, percent = "center" if fit.keep_aspect else "squash", _share(width, to)
    return {
        "input_size": [embedder.channels, height, width],
        "interpolation": "bilinear",
        "crop_mode": crop,
        "crop_pct": percent,
        "mean": embedder.mean_C.tolist(),
        "std": embedder.std_C.tolist(),
    }


def _share(side: int, to: int) -> float:
    """The share of ``to`` that a side is, so that timm's floor(side / share) is ``to``."""
    share = side / to
    while math.floor(side / share) < to:
        share = math.nextafter(share, 0)
    return share


def write(folder: Path, twin: TimmTwin, transform: Mapping[str, Any]) -> None:
    """Write both files."""
    network: Any = twin.network
    dim = int(network.num_classes)
    own = network.pretrained_cfg
    config = {
        "architecture": twin.architecture,
        "num_classes": dim,
        "num_features": twin.num_features,
        **({"model_args": twin.args} if twin.args else {}),
        # Without names of its own transformers takes a classifier of 1,000 for ImageNet's.
        **({"label_names": [str(number) for number in range(dim)]} if dim else {}),
        "pretrained_cfg": {
            **transform,
            "num_classes": dim,
            "pool_size": None,
            "fixed_input_size": bool(own.get("fixed_input_size", False)),
            "first_conv": own.get("first_conv"),
            "classifier": own.get("classifier"),
            "custom_load": False,
        },
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    state = {name: value.contiguous() for name, value in network.state_dict().items()}
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})


def write_transform(folder: Path, transform: Mapping[str, Any]) -> None:
    """Write a config.json that transformers' image processors understand, of a network that timm has no words for."""
    config = {"image_processor_type": "TimmWrapperImageProcessor", "pretrained_cfg": dict(transform)}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def computed(folder: Path, embedder: Embedder, images_NHWC: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The embeddings by timm's model in ``folder`` of images of the embedder's size, of unit norm if its are."""
    network, own = read(folder), embedder.architecture
    x_NHWC = torch.from_numpy(images_NHWC).float() / 255
    x_NHWC = x_NHWC.expand(-1, -1, -1, embedder.channels)
    x_NCHW = ((x_NHWC - embedder.mean_C.cpu()) / embedder.std_C.cpu()).permute(0, 3, 1, 2).contiguous()
    with torch.inference_mode(), full_float32():
        h_ND = network(x_NCHW)
    z_ND = F.normalize(h_ND, dim=1, eps=1e-12) if own.unit_norm else h_ND
    on_host: NDArray[np.float32] = z_ND.numpy()
    return on_host
