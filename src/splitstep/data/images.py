"""Labelled images as data sets are published: CIFAR, IDX, folders of image files. Always uint8, channels first."""

import hashlib
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from splitstep.data.files import PACKERS, checksum, find, fingerprint, lines, read_bytes
from splitstep.solver.errors import UserError, unknown

if TYPE_CHECKING:
    from PIL.Image import Image

CIFAR_SHAPE = (3, 32, 32)
IDX_IMAGES, IDX_LABELS = 2051, 2049  # magic numbers: unsigned bytes in three dimensions and in one
IMAGE_FILES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
EVERY_TEST_DIGIT = 5  # scikit-learn's digits are one set: every so many-th is for testing


@dataclass(frozen=True)
class Pictures:
    """Images of one size and the label of each."""

    pixels: NDArray[np.uint8]  # (number, channels, height, width)
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Place:
    """Where a data set lies, which of its labels are meant, and the size that files of any size are brought to."""

    folder: Path
    labels: str = "fine"
    size: int | None = None


@dataclass(frozen=True)
class Format:
    """How a data set is stored: the names of its labels, the images of a file, and the checksums of what is read."""

    names: Callable[[Place, list[str]], list[str]]  # by the names of the training files
    read: Callable[[Place, str, list[str]], Pictures]
    checksums: Callable[[Place, str], dict[str, str]]
    label_sets: tuple[str, ...] = ("fine",)
    packaged: bool = False  # comes with a Python package, so there is no folder
    resized: bool = False  # files of any size, brought to one


def read(format: Format, place: Place, files: list[str], names: list[str]) -> Pictures:  # noqa: A002
    """The images of several files, one after the other; every label is one of the names."""
    parts = [format.read(place, file, names) for file in files]
    for file, part in zip(files, parts, strict=True):
        if part.pixels.shape[1:] != parts[0].pixels.shape[1:]:
            first, other = (" x ".join(map(str, p.pixels.shape[1:])) for p in (parts[0], part))
            raise UserError(f"{place.folder / files[0]} has images of {first} and {place.folder / file} of {other}")
    return Pictures(np.concatenate([part.pixels for part in parts]), np.concatenate([part.labels for part in parts]))


def _pictures(path: Path, pixels: NDArray[np.uint8], labels: NDArray[Any], names: list[str]) -> Pictures:
    """What a file holds, when there are images, each has a label, and each label a name."""
    if not len(pixels):
        raise UserError(f"{path} holds no images")
    if len(pixels) != len(labels):
        raise UserError(f"{path} has {len(pixels):,} images and {len(labels):,} labels")
    wrong = np.flatnonzero((labels < 0) | (labels >= len(names)))
    if len(wrong):
        record = wrong[0]
        raise UserError(f"{path}, record {record + 1:,}: label {labels[record]} is none of 0 to {len(names) - 1}")
    return Pictures(pixels, labels.astype(np.int64))


def _one_file(place: Place, name: str) -> dict[str, str]:
    return fingerprint([find(place.folder, name)], under=place.folder)


# CIFAR, binary: records of one label (CIFAR-10), or of the coarse and the fine one (CIFAR-100), and the pixels.


def _cifar_records(path: Path, label_bytes: int) -> NDArray[np.uint8]:
    record = label_bytes + int(np.prod(CIFAR_SHAPE))
    content = read_bytes(path)
    whole, rest = divmod(len(content), record)
    if rest:
        raise UserError(f"{path} is cut short: record {whole + 1:,} has {rest:,} of {record:,} bytes")
    return np.frombuffer(content, np.uint8).reshape(whole, record)


def _read_cifar10(place: Place, name: str, names: list[str]) -> Pictures:
    path = find(place.folder, name)
    records = _cifar_records(path, 1)
    return _pictures(path, records[:, 1:].reshape(-1, *CIFAR_SHAPE), records[:, 0], names)


def _read_cifar100(place: Place, name: str, names: list[str]) -> Pictures:
    path = find(place.folder, name)
    records = _cifar_records(path, 2)
    column = ("coarse", "fine").index(place.labels)
    return _pictures(path, records[:, 2:].reshape(-1, *CIFAR_SHAPE), records[:, column], names)


def _cifar10_names(place: Place, train: list[str]) -> list[str]:
    return _listed_names(place, "batches.meta.txt")


def _cifar100_names(place: Place, train: list[str]) -> list[str]:
    return _listed_names(place, f"{place.labels}_label_names.txt")


def _listed_names(place: Place, name: str) -> list[str]:
    return [line.strip() for line in lines(find(place.folder, name)) if line.strip()]


# CIFAR, Python: pickled dictionaries of an array and lists, written by Python 2.

# What numpy's own pickles name. No other object can be reached, so no code of the file's choice can run.
_PICKLED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): np.zeros(0).__reduce__()[0],
    ("numpy._core.multiarray", "_reconstruct"): np.zeros(0).__reduce__()[0],
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}


class _Unpickler(pickle.Unpickler):
    """Arrays, strings, numbers, lists and dictionaries; anything else is refused before it is looked up."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _PICKLED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR file needs")
        return _PICKLED[module, name]


def unpickled(path: Path) -> dict[str, Any]:
    """The dictionary of a CIFAR file, read without executing anything in it."""
    content = read_bytes(path)
    try:
        loaded = _Unpickler(BytesIO(content), encoding="bytes").load()
    except Exception as error:  # a damaged pickle can raise anything
        raise UserError(f"{path} is no CIFAR pickle: {error}") from None
    if not isinstance(loaded, dict):
        raise UserError(f"{path} is no CIFAR pickle: it holds no dictionary")
    return {key.decode() if isinstance(key, bytes) else str(key): value for key, value in loaded.items()}


def _entry(table: dict[str, Any], path: Path, keys: tuple[str, ...]) -> Any:
    for key in keys:
        if key in table:
            return table[key]
    raise UserError(f"{path} has no {' or '.join(keys)}, only {', '.join(table)}")


_LABEL_KEYS = {"fine": ("labels", "fine_labels"), "coarse": ("coarse_labels",)}  # of CIFAR-10, then of CIFAR-100
_NAME_KEYS = {"fine": ("label_names", "fine_label_names"), "coarse": ("coarse_label_names",)}


def _read_cifar_python(place: Place, name: str, names: list[str]) -> Pictures:
    path = find(place.folder, name)
    table = unpickled(path)
    labels = np.asarray(_entry(table, path, _LABEL_KEYS[place.labels]))
    pixels = np.asarray(_entry(table, path, ("data",)))
    if pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape[1] != np.prod(CIFAR_SHAPE):
        raise UserError(f"{path}: data are {pixels.dtype} of {pixels.shape}, not bytes in rows of 3,072")
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise UserError(f"{path}: the labels are no list of whole numbers")
    return _pictures(path, pixels.reshape(-1, *CIFAR_SHAPE), labels, names)


def _cifar_python_names(place: Place, train: list[str]) -> list[str]:
    ten = any((place.folder / f"batches.meta{ending}").is_file() for ending in PACKERS)
    path = find(place.folder, "batches.meta" if ten else "meta")
    listed = _entry(unpickled(path), path, _NAME_KEYS[place.labels])
    return [name.decode() if isinstance(name, bytes) else str(name) for name in listed]


# IDX, the format of MNIST: a header of big-endian numbers, then the bytes.


def _idx_files(place: Place, name: str) -> tuple[Path, Path]:
    return find(place.folder, f"{name}-images-idx3-ubyte"), find(place.folder, f"{name}-labels-idx1-ubyte")


def _idx(path: Path, magic: int) -> NDArray[np.uint8]:
    content = read_bytes(path)
    dimensions = magic % 256
    header = np.frombuffer(content[: 4 * (1 + dimensions)].ljust(4 * (1 + dimensions), b"\0"), ">i4")
    if header[0] != magic:
        raise UserError(f"{path} begins with the magic number {header[0]}, not with {magic}")
    shape, body = tuple(header[1:].tolist()), content[4 * (1 + dimensions) :]
    if min(shape) < 0 or len(body) != np.prod(shape, dtype=np.int64):
        stated = " x ".join(map(str, shape))
        raise UserError(f"{path}: the header says {stated} bytes, and {len(body):,} bytes follow it")
    return np.frombuffer(body, np.uint8).reshape(shape)


def _read_idx(place: Place, name: str, names: list[str]) -> Pictures:
    images, labels = _idx_files(place, name)
    pixels, numbers = _idx(images, IDX_IMAGES), _idx(labels, IDX_LABELS)
    if len(pixels) != len(numbers):
        raise UserError(f"{images} has {len(pixels):,} images and {labels} has {len(numbers):,} labels")
    return _pictures(labels, pixels[:, None], numbers, names)


def _idx_names(place: Place, train: list[str]) -> list[str]:
    largest = max(int(_idx(_idx_files(place, name)[1], IDX_LABELS).max(initial=0)) for name in train)
    return [str(number) for number in range(largest + 1)]


def _idx_checksums(place: Place, name: str) -> dict[str, str]:
    return fingerprint(_idx_files(place, name), under=place.folder)


# Folders: `train/cat/1.png`. Images are brought to squares of one size as an image processor does it.


def _classes(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise UserError(f"no folder {folder}")
    found = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not found:
        raise UserError(f"{folder} has no folder for each class")
    return found


def _image_files(folder: Path) -> list[Path]:
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_FILES)
    if not found:
        raise UserError(f"{folder} has no image files ({', '.join(sorted(IMAGE_FILES))})")
    return found


def _read_folder(place: Place, name: str, names: list[str]) -> Pictures:
    assert place.size is not None
    pixels, labels = [], []
    for folder in _classes(place.folder / name):
        if folder.name not in names:
            raise unknown("class", folder.name, names)
        for path in _image_files(folder):
            pixels.append(squared(opened_image(path), place.size))
            labels.append(names.index(folder.name))
    return _pictures(place.folder / name, np.stack(pixels), np.asarray(labels), names)


def opened_image(path: Path) -> "Image":
    """An image file, in colours."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(f"{path} cannot be read as an image: {error}") from None


def squared(image: "Image", size: int) -> NDArray[np.uint8]:
    """The middle of an image whose shorter side was brought to that size, bicubic."""
    from PIL.Image import Resampling

    width, height = image.size
    shorter = min(width, height)
    wide, high = int(size * width / shorter), int(size * height / shorter)
    if (wide, high) != image.size:
        image = image.resize((wide, high), Resampling.BICUBIC)
    left, top = (wide - size) // 2, (high - size) // 2
    return as_pixels(image.crop((left, top, left + size, top + size)))


def as_image(pixels: NDArray[np.uint8]) -> "Image":
    """Channels-first pixels as Pillow takes them."""
    from PIL import Image

    return Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0)) if len(pixels) > 1 else pixels[0])


def as_pixels(image: "Image") -> NDArray[np.uint8]:
    """An image of Pillow's, channels first."""
    array = np.asarray(image)
    return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)


def _folder_names(place: Place, train: list[str]) -> list[str]:
    return sorted({folder.name for name in train for folder in _classes(place.folder / name)})


def _folder_checksums(place: Place, name: str) -> dict[str, str]:
    """One checksum of all names and contents: a file each would make a long list."""
    whole = hashlib.sha256()
    for path in _image_files(place.folder / name):
        whole.update(f"{path.relative_to(place.folder)} {checksum(path)}\n".encode())
    return {name: whole.hexdigest()}


# Digits: 1,797 images of 8 x 8 that scikit-learn brings along.


def _read_digits(place: Place, name: str, names: list[str]) -> Pictures:
    from sklearn.datasets import load_digits

    if name not in ("train", "test"):
        raise unknown("part of the digits", name, ("train", "test"))
    digits: Any = load_digits()
    pixels = (digits.images * (255 / 16)).round().astype(np.uint8)[:, None]
    chosen = (np.arange(len(pixels)) % EVERY_TEST_DIGIT == 0) == (name == "test")
    return _pictures(Path("digits"), pixels[chosen], digits.target[chosen], names)


def _digit_names(place: Place, train: list[str]) -> list[str]:
    return [str(digit) for digit in range(10)]


def _digit_checksums(place: Place, name: str) -> dict[str, str]:
    from sklearn import datasets

    return fingerprint([Path(datasets.__file__).parent / "data" / "digits.csv.gz"], under=place.folder)


# A new format of images is one entry.
FORMATS: dict[str, Format] = {
    "cifar10": Format(_cifar10_names, _read_cifar10, _one_file),
    "cifar100": Format(_cifar100_names, _read_cifar100, _one_file, label_sets=("fine", "coarse")),
    "cifar-python": Format(_cifar_python_names, _read_cifar_python, _one_file, label_sets=("fine", "coarse")),
    "idx": Format(_idx_names, _read_idx, _idx_checksums),
    "folder": Format(_folder_names, _read_folder, _folder_checksums, resized=True),
    "digits": Format(_digit_names, _read_digits, _digit_checksums, packaged=True),
}
