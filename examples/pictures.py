"""Folders of pictures, decoded as they are needed: config and data, without JAX.

    python -m haiku_template.train --config=examples/pictures.py \
        --config.data.path=FOLDER --workdir=runs/pictures

FOLDER has train/CLASS/*.png and test/CLASS/*.png (or .jpg), each at least `size` pixels
wide and high. Two processes make the batches, and import no JAX, as this module does
not (docs/workers.md). Decoding needs `pip install pillow`.
"""

import dataclasses
from pathlib import Path

import numpy as np
from ml_collections import config_dict
from PIL import Image

from haiku_template.config import default_config
from haiku_template.data import BatchSpec, Data
from haiku_template.data.dataset import epochs
from haiku_template.data.images import scale_pixels
from haiku_template.errors import ConfigError

ENDINGS = {".png", ".jpg", ".jpeg"}


def get_config() -> config_dict.ConfigDict:
    """Configures the experiment."""
    config = default_config()
    config.num_steps, config.batch_size = 2000, 64
    config.model = {"name": "resnet"}
    config.data = {"name": "examples.pictures:pictures", "path": "", "size": 128}
    config.data.workers = 2
    return config


@dataclasses.dataclass(frozen=True)
class Pictures:
    """Training set: a cut of each picture at a random place, half of them mirrored."""

    paths: tuple[Path, ...]
    labels: np.ndarray
    spec: BatchSpec
    size: int

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """Decodes this process's share: uint8 [B / processes, size, size, 3]."""
        rows = epochs(len(self.paths), self.spec, step)[self.spec.share()]
        inputs = np.empty((len(rows), self.size, self.size, 3), np.uint8)
        for picture, row in zip(inputs, rows, strict=True):
            # Of the step and the picture: shares do not change what is drawn.
            rng = np.random.default_rng((self.spec.seed, 1, step, row))
            pixels = cut(self.paths[row], self.size, rng.random(2))
            picture[:] = pixels[:, :: rng.choice((-1, 1))]
        return {"inputs": inputs, "labels": self.labels[rows]}


@dataclasses.dataclass(frozen=True)
class PicturesInOrder:
    """Evaluation set: the middle of each picture."""

    paths: tuple[Path, ...]
    labels: np.ndarray
    batch_size: int
    size: int

    @property
    def num_batches(self) -> int:
        """Number of batches; the last may have fewer rows."""
        return -(-len(self.paths) // self.batch_size)

    def batch(self, index: int) -> dict[str, np.ndarray]:
        """Decodes one batch: uint8 [B, size, size, 3]."""
        rows = slice(index * self.batch_size, (index + 1) * self.batch_size)
        inputs = [cut(path, self.size, (0.5, 0.5)) for path in self.paths[rows]]
        return {"inputs": np.stack(inputs), "labels": self.labels[rows]}


def cut(path: Path, size: int, place: np.ndarray | tuple[float, float]) -> np.ndarray:
    """Cuts a square out of a picture, `place` from 0 to 1: uint8 [size, size, 3]."""
    with Image.open(path) as file:
        if min(file.size) < size:
            raise ConfigError(
                f"{path} has {file.size[0]} x {file.size[1]} pixels, and "
                f"config.data.size is {size}; remove it, or use a smaller size"
            )
        width, height = file.size
        left = int(place[0] * (width - size + 1))
        top = int(place[1] * (height - size + 1))
        box = left, top, left + size, top + size
        return np.asarray(file.convert("RGB").crop(box))


def pictures(spec: BatchSpec, *, path: str, size: int = 128) -> Data:
    """Makes `Data` of a folder, whose classes are folders in the order of names."""
    names, sets = [], []
    for part in ("train", "test"):
        folders = sorted(Path(path, part).glob("[!.]*/"))
        names = names or [folder.name for folder in folders]
        if odd := [folder for folder in folders if folder.name not in names]:
            raise ConfigError(
                f"config.data.path={path}: {odd[0]} is a class that train/ does not "
                "have; remove it, or add pictures to train/"
            )
        files = [
            (file, names.index(folder.name))
            for folder in folders
            for file in sorted(folder.iterdir())
            if file.suffix.lower() in ENDINGS and file.name[0] != "."
        ]
        if not files:
            raise ConfigError(f"config.data.path={path}: no pictures in {part}/CLASS/")
        paths, labels = zip(*files, strict=True)
        sets.append((paths, np.array(labels, np.int32)))
    train, test = sets
    return Data(
        Pictures(*train, spec, size),
        PicturesInOrder(*test, spec.batch_size, size),
        len(names),
        preprocess=scale_pixels,
        class_names=tuple(names),
    )
