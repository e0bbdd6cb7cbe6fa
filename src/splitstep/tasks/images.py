"""Image classification: labelled images, DeiT's augmentation, patches of an image as particles, accuracy."""

import json
from collections import ChainMap
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from splitstep.data.augment import (
    Augmentation,
    augmented,
    erase,
    image_generator,
    mixture,
    update_generator,
)
from splitstep.data.batches import Indices, Piece, Update
from splitstep.data.cache import cached
from splitstep.data.images import FORMATS, Format, Pictures, Place, as_image, opened_image, read, squared
from splitstep.data.places import data_folder
from splitstep.data.settings import Section, one_held_out
from splitstep.solver.errors import UserError
from splitstep.tasks.base import Batch, Measured, Task, likeliest

if TYPE_CHECKING:
    from PIL.Image import Image

    from splitstep.models.configuration import SplitstepConfig
    from splitstep.tasks.prediction import Predictor

Files = Annotated[list[str], Field(min_length=1)]
Channels = Annotated[list[float], Field(min_length=1, max_length=3)]
TOP = 5


class ImagesData(Section):
    """Where the images are and how they become the model's input."""

    root: str | None = None  # the folder of all data sets; SPLITSTEP_DATA without it
    folder: str = "."  # of this data set, in the root
    format: Literal["cifar10", "cifar100", "cifar-python", "idx", "folder", "digits"]
    labels: Literal["fine", "coarse"] = "fine"  # CIFAR-100 has both
    train: Files  # names of files; of an IDX pair what stands before -images; of image folders the folder
    valid: Files | None = None
    test: Files | None = None
    valid_every: int | None = Field(default=None, gt=1)  # every n-th of train is held out, where valid is no file
    image_size: int | None = Field(default=None, gt=0)  # of the model's input; as the images are without it
    mean: Channels | None = None  # of the pixels in [0, 1], a channel; that of the training images without it
    std: Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=1, max_length=3)] | None = None
    augmentation: Augmentation = Augmentation()

    @model_validator(mode="after")
    def _fits(self) -> "ImagesData":
        if self.labels not in FORMATS[self.format].label_sets:
            raise ValueError(f"data.labels = {self.labels!r} is for CIFAR-100, not for data.format = {self.format!r}")
        one_held_out(self.valid, self.valid_every)
        if FORMATS[self.format].resized and self.image_size is None:
            raise ValueError(f"data.format = {self.format!r} needs data.image_size: image files can have any size")
        return self


class ImagesEvaluation(Section):
    """How an image is cut when nothing is drawn."""

    crop_ratio: float = Field(default=1.0, gt=0, le=1)  # the middle of an image that is so much larger, bicubic


class Images(Task):
    """The class of an image."""

    Data, Evaluation = ImagesData, ImagesEvaluation
    kind = "image"
    model_class = "SplitstepForImageClassification"
    metric = "accuracy"
    reported = ("loss", "accuracy", "top5")
    unit = "images"

    # Where the images come from

    @property
    def _format(self) -> Format:
        return FORMATS[self.data.format]

    @cached_property
    def _place(self) -> Place:
        if self._format.packaged:
            return Place(Path(), self.data.labels)
        folder = data_folder(self.data.root, self.data.folder, self.say)
        # Files of any size are kept as evaluation resizes them.
        return Place(folder, self.data.labels, self._resize(self.data.image_size) if self._format.resized else None)

    def _resize(self, image_size: int) -> int:
        return int(image_size / self.evaluation.crop_ratio)

    @cached_property
    def _checksums(self) -> dict[str, dict[str, str]]:
        """Those of the files of each split that has files."""
        files = {split: getattr(self.data, split) or [] for split in ("train", "valid", "test")}
        sums = {split: [self._format.checksums(self._place, name) for name in names] for split, names in files.items()}
        return {split: dict(ChainMap(*parts)) for split, parts in sums.items()}

    @property
    def fingerprint(self) -> dict[str, str]:
        """The files of all splits."""
        return dict(ChainMap(*self._checksums.values()))

    @cached_property
    def names(self) -> list[str]:
        """What each label is called; a trained model's data must have its labels."""
        names: list[str] = self._format.names(self._place, self.data.train)
        if self.folder is not None and (known := _known(self.folder)) != names:
            raise UserError(f"the labels of the data, {_some(names)}, are not the model's, {_some(known)}")
        return names

    def _stored(self, split: str) -> Pictures:
        """The images of the split's files, mapped into memory."""
        if split not in self._opened:
            files = getattr(self.data, split)
            if not files:
                raise UserError(f"the recipe names no data.{split}")
            made_from = {"task": "images", "format": self.data.format, "labels": self.data.labels, "names": self.names}
            made_from |= {"size": self._place.size, "files": files, "checksums": self._checksums[split]}
            folder = cached(made_from, lambda folder: self._prepare(files, folder))
            self._opened[split] = Pictures(
                np.load(folder / "pixels.npy", mmap_mode="r"), np.load(folder / "labels.npy")
            )
        return self._opened[split]

    @cached_property
    def _opened(self) -> dict[str, Pictures]:
        return {}

    def _prepare(self, files: list[str], folder: Path) -> None:
        self.say(f"reading the images of {', '.join(files)}")
        pictures = read(self._format, self._place, files, self.names)
        np.save(folder / "pixels.npy", pictures.pixels)
        np.save(folder / "labels.npy", pictures.labels)

    def _rows(self, split: str) -> tuple[Pictures, Indices]:
        """The images that a split is among, and where in them it is."""
        stored = self._stored(self.files_of(split))
        return stored, np.fromiter(self.own(range(len(stored)), split), dtype=np.int64)

    # What the model takes

    @cached_property
    def image_size(self) -> int:
        """The height and width of the model's input."""
        if self.data.image_size is not None:
            return self.data.image_size
        height, width = self._stored("train").pixels.shape[2:]
        if height != width:
            raise UserError(f"the images are {height} x {width}; data.image_size makes them square")
        return int(height)

    @cached_property
    def _channels(self) -> int:
        return int(self._stored("train").pixels.shape[1])

    @cached_property
    def normalization(self) -> tuple[list[float], list[float]]:
        """Mean and standard deviation of each channel: the trained model's, the recipe's, or the training images'."""
        if self.folder is not None:
            processor = json.loads((self.folder / "preprocessor_config.json").read_text())
            return processor["image_mean"], processor["image_std"]
        mean, std = self.data.mean, self.data.std
        if mean is None or std is None:
            own = _moments(*self._rows("train"))
            mean, std = mean or own[0], std or own[1]
        for name, values in (("mean", mean), ("std", std)):
            if len(values) != self._channels:
                raise UserError(f"data.{name} has {len(values)} numbers and the images have {self._channels} channels")
        return mean, std

    def settings(self) -> dict[str, Any]:
        """Size, channels and labels. One label of many, so that rows of probabilities are soft targets."""
        return {
            "image_size": self.image_size,
            "num_channels": self._channels,
            "id2label": dict(enumerate(self.names)),
            "label2id": {name: i for i, name in enumerate(self.names)},
            "problem_type": "single_label_classification",
        }

    def save_processor(self, folder: Path) -> None:
        """The image processor that does what evaluation does."""
        from splitstep.models.processing import image_processor

        mean, std = self.normalization
        image_processor(
            image_size=self.image_size,
            resize=self._resize(self.image_size),
            num_channels=self._channels,
            mean=mean,
            std=std,
        ).save_pretrained(folder)

    def lengths(self, split: str) -> NDArray[np.int64]:
        """The rows of pixels of each image: so evaluation takes 256 images of 32 pixels at a time, and 36 of 224."""
        return np.full(len(self._rows(split)[1]), self.image_size)

    def flops_per_unit(self, config: "SplitstepConfig", *, sequences: int = 1) -> int:
        """Floating-point operations of a forward pass, an image."""
        from splitstep.models.accounting import flops_per_token, sequence_length

        return flops_per_token(config, sequences=sequences) * sequence_length(config)

    def _normalized(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        mean, std = (np.asarray(values, np.float32)[:, None, None] for values in self.normalization)
        return (pixels * np.float32(1 / 255) - mean) / std

    def batch(self, split: str, indices: Indices, *, epoch: int | None = None, seed: int = 0) -> Batch:
        """Images and their labels."""
        if epoch is not None:
            update = Update(epoch, 0, indices, np.zeros_like(indices))
            return self.training_batch(Piece(update, np.arange(len(indices))), seed=seed)
        stored, rows = self._rows(split)
        chosen = rows[indices]
        pixels, labels = self._middles(stored.pixels[chosen]), stored.labels[chosen]
        return {"pixel_values": self._normalized(pixels), "labels": labels, "num_items": np.asarray(labels.size)}

    def _middles(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The images as the image processor resizes and cuts them."""
        size, resize = self.image_size, self._resize(self.image_size)
        if pixels.shape[2:] != (resize, resize):
            pixels = np.stack([squared(as_image(image), resize) for image in pixels])
        edge = (resize - size) // 2
        return pixels[..., edge : edge + size, edge : edge + size]

    # Training

    def training_batch(self, piece: Piece, *, seed: int) -> Batch:
        """Augmented images, and their labels or, where images are mixed, the shares of labels."""
        settings, update = self.data.augmentation, piece.update
        if not settings.mixes:
            pixels, labels = self._drawn(update, piece.places, seed)
            return {"pixel_values": pixels, "labels": labels, "num_items": np.asarray(labels.size)}
        partners = len(update) - 1 - piece.places
        needed, where = np.unique(np.concatenate((piece.places, partners)), return_inverse=True)
        own, others = np.split(where, 2)
        pixels, labels = self._drawn(update, needed, seed)
        mixed = mixture(settings, update_generator(seed, update.epoch, update.number), size=self.image_size)
        shares = mixed.labels(labels[own], labels[others], len(self.names))
        pixels = mixed.images(pixels[own], pixels[others])
        return {"pixel_values": pixels, "labels": shares, "num_items": np.asarray(shares.size)}

    def _drawn(self, update: Update, places: Indices, seed: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """The images at these places of an update, each with what is drawn for it, and their labels."""
        settings = self.data.augmentation
        stored, rows = self._rows("train")
        indices, turns = update.indices[places], update.turns[places]
        draws = [image_generator(seed, update.epoch, *map(int, key)) for key in zip(indices, turns, strict=True)]
        chosen = rows[indices]
        fill = tuple(min(255, round(255 * value)) for value in self.normalization[0])
        raw = zip(stored.pixels[chosen], draws, strict=True)
        pixels = self._normalized(
            np.stack([augmented(image, settings, rng, size=self.image_size, mean=fill) for image, rng in raw])
        )
        for image, rng in zip(pixels, draws, strict=True):
            erase(image, settings.reprob, rng)
        return pixels, stored.labels[chosen]

    def units(self, items: int) -> int:
        """Images; each share of a mixed label is an item of the loss."""
        return items // len(self.names) if self.data.augmentation.mixes else items

    # Evaluation

    def measure(self, predictor: "Predictor", split: str) -> Measured:
        """The share of images whose label comes first, and among the first five; each image's prediction."""
        results: dict[int, tuple[int, int, bool, float]] = {}
        with predictor:
            for indices in predictor.shares(self.lengths(split)):
                results |= zip(indices.tolist(), self._predicted(predictor, split, indices), strict=True)
        labels, predictions, among, losses = zip(*predictor.gathered(results), strict=True)
        metrics = {
            "accuracy": float(np.equal(labels, predictions).mean()),
            f"top{TOP}": float(np.mean(among)),
            "loss": float(np.mean(losses)),
        }
        pairs = zip(labels, predictions, strict=True)
        return Measured(metrics, [{"label": self.names[label], "prediction": self.names[p]} for label, p in pairs])

    def _predicted(self, predictor: "Predictor", split: str, indices: Indices) -> list[tuple[int, int, bool, float]]:
        """(label, prediction, whether the label is among the first five, loss) of each image."""
        import torch

        batch = predictor.to_device(self.batch(split, indices))
        logits = predictor.model(pixel_values=batch["pixel_values"]).logits.float()
        labels = batch["labels"]
        losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        best = logits.topk(min(TOP, logits.shape[-1])).indices
        among = (best == labels[:, None]).any(-1)
        return list(zip(*(x.tolist() for x in (labels, best[:, 0], among, losses)), strict=True))

    # Use

    def example_of(self, line: str, *, place: str) -> "Image":
        """The image whose path stands in a line."""
        try:
            return opened_image(Path(line.strip()))
        except UserError as error:
            raise UserError(f"{place}: {error}") from None

    def remarks(self, rows: list["Image"]) -> Iterator[tuple[int, str]]:
        """Nothing: an image of any size is brought to the model's."""
        return iter(())

    def classified(self, rows: list["Image"], predictor: "Predictor") -> list[tuple[str, float]]:
        """The likeliest label of each image and its probability."""
        from splitstep.models.processing import SplitstepImageProcessor

        assert self.folder is not None
        processor, names = SplitstepImageProcessor.from_pretrained(self.folder), _known(self.folder)
        with predictor:
            logits = predictor.logits({"pixel_values": processor(images=rows, return_tensors="np")["pixel_values"]})
        return [(names[number], probability) for number, probability in likeliest(logits)]


def _known(folder: Path) -> list[str]:
    """The labels of a trained model by their number."""
    known = json.loads((folder / "config.json").read_text())["id2label"]
    return [known[str(number)] for number in range(len(known))]


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f", ... ({len(names)})" if len(names) > 3 else "")


def _moments(stored: Pictures, rows: Indices) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel, from counts of the 256 values: exact, and little memory."""
    channels = stored.pixels.shape[1]
    counts = np.zeros((channels, 256))
    for start in range(0, len(rows), 1000):
        part = stored.pixels[rows[start : start + 1000]]
        for channel in range(channels):
            counts[channel] += np.bincount(part[:, channel].ravel(), minlength=256)
    values = np.arange(256) / 255
    share = counts / counts.sum(1, keepdims=True)
    mean = share @ values
    variance = share @ values**2 - mean**2
    # A channel that is one colour has nothing to scale.
    std = np.where(variance > 1e-12, np.sqrt(np.maximum(variance, 0)), 1.0)
    return [round(float(m), 4) for m in mean], [round(float(s), 4) for s in std]
