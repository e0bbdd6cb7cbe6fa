"""What is done to training images, as DeiT does it (Touvron et al. 2021, by way of timm).

Everything is drawn from a generator of the image's own, seeded by the run's seed, the epoch, the image's number and how
often it was shown before in that epoch. So an image does not depend on its batch, on the number of workers, or on
whether the run was interrupted.

Mixing takes two images. Both are of one update: the first with the last, the second with the last but one, and so on,
with one share for all, which the number of the update seeds. So it does not depend on how an update is cut into
micro-batches either; a partner in another micro-batch is made here too, as it is made there.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import ImageEnhance, ImageOps
from PIL.Image import Image as Picture
from PIL.Image import Resampling, Transform
from pydantic import AfterValidator, Field, model_validator

from splitstep.data.images import as_image, as_pixels
from splitstep.data.settings import Section

_IMAGES, _UPDATES = 1, 2  # what is drawn for: no two draws of a run share a seed
ATTEMPTS = 10  # at a random box that fits, before going without

Probability = Annotated[float, Field(ge=0, le=1)]


def _ascending(ends: list[float]) -> list[float]:
    if ends[0] > ends[1]:
        raise ValueError("the first of two ends is no greater than the second")
    return ends


Shares = Annotated[
    list[Annotated[float, Field(gt=0, le=1)]], Field(min_length=2, max_length=2), AfterValidator(_ascending)
]
Ratios = Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=2, max_length=2), AfterValidator(_ascending)]


@dataclass(frozen=True)
class RandAugment:
    """So many operations, drawn with replacement, of about this strength out of 10 (Cubuk et al. 2020)."""

    magnitude: float
    deviation: float
    operations: int


@cache
def rand_augment(name: str) -> RandAugment | None:
    """The policy that timm calls so, such as rand-m9-mstd0.5-inc1; none for 'none'."""
    if name == "none":
        return None
    parts = re.fullmatch(r"rand-m(\d+)(?:-n(\d+))?(?:-mstd([\d.]+))?-inc1", name)
    if parts is None:
        raise ValueError(
            "aa is 'none' or one like 'rand-m9-mstd0.5-inc1' (m: strength, n: operations, mstd: its spread)"
        )
    magnitude, operations, deviation = parts.groups()
    return RandAugment(float(magnitude), float(deviation or 0), int(operations or 2))


def _known(name: str) -> str:
    rand_augment(name)
    return name


class Augmentation(Section):
    """What is done to training images, by the names of DeiT's options. Without settings, nothing."""

    crop: Literal["none", "padded", "resized"] = "none"
    padding: int = Field(default=4, ge=0)  # pixels on each side, crop = "padded"
    scale: Shares = [0.08, 1.0]  # of the area, crop = "resized"
    ratio: Ratios = [3 / 4, 4 / 3]  # of width to height, crop = "resized"
    hflip: Probability = 0.0
    aa: Annotated[str, AfterValidator(_known)] = "none"
    color_jitter: float = Field(default=0.0, ge=0, le=1)
    reprob: Probability = 0.0  # random erasing
    mixup: float = Field(default=0.0, ge=0)  # alpha of the share's Beta distribution; 0 is never
    cutmix: float = Field(default=0.0, ge=0)
    mixup_prob: Probability = 1.0
    mixup_switch_prob: Probability = 0.5  # of cutmix, where there are both

    @model_validator(mode="after")
    def _fits(self) -> "Augmentation":
        if self.aa != "none" and self.color_jitter:
            raise ValueError("data.augmentation: color_jitter is the alternative to aa; give one of them")
        return self

    @property
    def distorts(self) -> bool:
        """Whether an image by itself is changed, apart from erasing."""
        return self.crop != "none" or self.aa != "none" or bool(self.hflip or self.color_jitter)

    @property
    def mixes(self) -> bool:
        """Whether labels become shares of two."""
        return bool(self.mixup or self.cutmix)


def image_generator(seed: int, epoch: int, index: int, turn: int) -> Generator:
    """What an image draws from when it is shown for the `turn`-th time in an epoch, counted from 0."""
    return np.random.default_rng((seed, epoch, _IMAGES, index, turn))


def update_generator(seed: int, epoch: int, number: int) -> Generator:
    """What all images of an update draw from together."""
    return np.random.default_rng((seed, epoch, _UPDATES, number))


def augmented(
    pixels: NDArray[np.uint8], settings: Augmentation, rng: Generator, *, size: int, mean: tuple[int, ...]
) -> NDArray[np.uint8]:
    """A cropped, flipped and distorted image of that size; `mean` fills what turns into view."""
    if not settings.distorts and pixels.shape[1:] == (size, size):
        return pixels
    pixels = CROPS[settings.crop](pixels, settings, rng, size)
    if rng.random() < settings.hflip:
        pixels = pixels[..., ::-1]
    policy = rand_augment(settings.aa)
    if policy is None and not settings.color_jitter:
        return pixels
    # Pillow, image by image, is what DeiT ran. kornia's batched operations, two images an operation, are no faster: the
    # two rounds of RandAugment on 64 images of 32 pixels take 9 ms of one core, and 8 ms here.
    image = as_image(pixels)
    if policy is not None:
        image = _randomly_augmented(image, policy, rng, mean if len(mean) > 1 else mean[0])
    if settings.color_jitter:
        image = _jittered(image, settings.color_jitter, rng)
    return as_pixels(image)


def _log_uniform(rng: Generator, low: float, high: float) -> float:
    return math.exp(rng.uniform(math.log(low), math.log(high)))


# Crops


Pixels = NDArray[np.uint8]


def _whole(pixels: Pixels, settings: Augmentation, rng: Generator, size: int) -> Pixels:
    if pixels.shape[1:] == (size, size):
        return pixels
    return as_pixels(as_image(pixels).resize((size, size), Resampling.BICUBIC))


def _padded_crop(pixels: Pixels, settings: Augmentation, rng: Generator, size: int) -> Pixels:
    left, top = (int(x) for x in rng.integers(-settings.padding, settings.padding + 1, 2))
    whole = _whole(pixels, settings, rng, size)
    shifted = np.zeros_like(whole)  # what lies outside an image is black
    high, wide = max(size - abs(top), 0), max(size - abs(left), 0)
    there, here = (max(top, 0), max(left, 0)), (max(-top, 0), max(-left, 0))
    shifted[:, here[0] : here[0] + high, here[1] : here[1] + wide] = whole[
        :, there[0] : there[0] + high, there[1] : there[1] + wide
    ]
    return shifted


def _resized_crop(pixels: Pixels, settings: Augmentation, rng: Generator, size: int) -> Pixels:
    image = as_image(pixels)
    return as_pixels(image.crop(_part(image.size, settings, rng)).resize((size, size), Resampling.BICUBIC))


def _part(whole: tuple[int, int], settings: Augmentation, rng: Generator) -> tuple[int, int, int, int]:
    """A box of random area and aspect; where none fits, the largest in the middle whose aspect is allowed."""
    width, height = whole
    (smallest, largest), (low, high) = settings.scale, settings.ratio
    for _ in range(ATTEMPTS):
        area = width * height * rng.uniform(smallest, largest)
        ratio = _log_uniform(rng, low, high)
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1))
            return left, top, left + w, top + h
    ratio = min(max(width / height, low), high)
    w, h = min(width, round(height * ratio)), min(height, round(width / ratio))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


CROPS: dict[str, Callable[[Pixels, Augmentation, Generator, int], Pixels]] = {
    "none": _whole,
    "padded": _padded_crop,
    "resized": _resized_crop,
}


# RandAugment: timm's operations that grow with the magnitude, each skipped half of the time.

Fill = tuple[int, ...] | int
Level = Callable[[float, Generator], float]  # what a strength in [0, 1] means to an operation
Apply = Callable[[Picture, float, Fill], Picture]


def _either_sign(x: float, rng: Generator) -> float:
    return -x if rng.random() > 0.5 else x


def _up_to(most: float) -> Level:
    return lambda strength, rng: _either_sign(strength * most, rng)


def _factor(strength: float, rng: Generator) -> float:
    return max(0.1, 1 + _either_sign(strength * 0.9, rng))


def _nothing(strength: float, rng: Generator) -> float:
    return 0.0


def _warped(image: Picture, matrix: tuple[float, ...], fill: Fill) -> Picture:
    return image.transform(image.size, Transform.AFFINE, matrix, Resampling.BICUBIC, fillcolor=fill)


def _enhanced(enhance: Callable[[Picture], Any]) -> Apply:
    return lambda image, factor, fill: enhance(image).enhance(factor)


def _brightened_darks(image: Picture, added: float, fill: Fill) -> Picture:
    table = [min(255, i + int(added)) if i < 128 else i for i in range(256)]
    return image.point(table * len(image.getbands()))


OPERATIONS: dict[str, tuple[Level, Apply]] = {
    "autocontrast": (_nothing, lambda image, x, fill: ImageOps.autocontrast(image)),
    "equalize": (_nothing, lambda image, x, fill: ImageOps.equalize(image)),
    "invert": (_nothing, lambda image, x, fill: ImageOps.invert(image)),
    "rotate": (_up_to(30), lambda image, x, fill: image.rotate(x, Resampling.BICUBIC, fillcolor=fill)),
    "posterize": (lambda s, rng: max(4 - int(s * 4), 1), lambda image, x, fill: ImageOps.posterize(image, int(x))),
    "solarize": (lambda s, rng: 256 - min(256, int(s * 256)), lambda image, x, fill: ImageOps.solarize(image, int(x))),
    "solarize_add": (lambda s, rng: min(128, int(s * 110)), _brightened_darks),
    "color": (_factor, _enhanced(ImageEnhance.Color)),
    "contrast": (_factor, _enhanced(ImageEnhance.Contrast)),
    "brightness": (_factor, _enhanced(ImageEnhance.Brightness)),
    "sharpness": (_factor, _enhanced(ImageEnhance.Sharpness)),
    "shear_x": (_up_to(0.3), lambda image, x, fill: _warped(image, (1, x, 0, 0, 1, 0), fill)),
    "shear_y": (_up_to(0.3), lambda image, x, fill: _warped(image, (1, 0, 0, x, 1, 0), fill)),
    "translate_x": (_up_to(0.45), lambda image, x, fill: _warped(image, (1, 0, x * image.width, 0, 1, 0), fill)),
    "translate_y": (_up_to(0.45), lambda image, x, fill: _warped(image, (1, 0, 0, 0, 1, x * image.height), fill)),
}


def _randomly_augmented(image: Picture, policy: RandAugment, rng: Generator, fill: Fill) -> Picture:
    table = tuple(OPERATIONS.values())
    for row in rng.integers(len(table), size=policy.operations):
        if rng.random() < 0.5:
            strength = min(max(rng.normal(policy.magnitude, policy.deviation), 0), 10) / 10
            level, apply = table[row]
            image = apply(image, level(strength, rng), fill)
    return image


JITTERED = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)


def _jittered(image: Picture, strength: float, rng: Generator) -> Picture:
    for which in rng.permutation(len(JITTERED)):
        image = JITTERED[which](image).enhance(rng.uniform(1 - strength, 1 + strength))
    return image


# Erasing

ERASED_AREA = (0.02, 1 / 3)
ERASED_RATIO = (0.3, 1 / 0.3)


def erase(pixels: NDArray[np.float32], probability: float, rng: Generator) -> None:
    """Put noise in place of a random box of a normalised image (Zhong et al. 2020)."""
    if rng.random() >= probability:
        return
    channels, height, width = pixels.shape
    for _ in range(ATTEMPTS):
        area = height * width * rng.uniform(*ERASED_AREA)
        ratio = _log_uniform(rng, *ERASED_RATIO)
        h, w = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if h < height and w < width:
            top, left = int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1))
            pixels[:, top : top + h, left : left + w] = rng.standard_normal((channels, h, w), np.float32)
            return


# Mixing


@dataclass(frozen=True)
class Mixture:
    """How images are mixed with their partners: blended, or a box of the partner put in."""

    share: float  # of the image itself
    box: tuple[slice, slice] | None = None

    def images(self, own: NDArray[np.float32], partners: NDArray[np.float32]) -> NDArray[np.float32]:
        """The mixed images."""
        if self.box is None:
            return own * np.float32(self.share) + partners * np.float32(1 - self.share)
        mixed = own.copy()
        mixed[..., *self.box] = partners[..., *self.box]
        return mixed

    def labels(self, own: NDArray[np.int64], partners: NDArray[np.int64], count: int) -> NDArray[np.float32]:
        """The shares of both labels among `count` labels."""
        mixed = np.zeros((len(own), count), np.float32)
        rows = np.arange(len(own))
        mixed[rows, own] += np.float32(self.share)
        mixed[rows, partners] += np.float32(1 - self.share)
        return mixed


def mixture(settings: Augmentation, rng: Generator, *, size: int) -> Mixture:
    """Mixup (Zhang et al. 2018), CutMix (Yun et al. 2019), or the image alone."""
    if rng.random() >= settings.mixup_prob:
        return Mixture(1.0)
    cut = settings.cutmix and (not settings.mixup or rng.random() < settings.mixup_switch_prob)
    if not cut:
        return Mixture(float(rng.beta(settings.mixup, settings.mixup)))
    # A box of the area 1 - share around any pixel; what lies outside the image is given back to the share.
    side = int(size * math.sqrt(1 - rng.beta(settings.cutmix, settings.cutmix)))
    ends = [(max(c - side // 2, 0), min(c + side // 2, size)) for c in map(int, rng.integers(size, size=2))]
    (top, bottom), (left, right) = ends
    share = 1 - (bottom - top) * (right - left) / size**2
    return Mixture(share, (slice(top, bottom), slice(left, right)))
