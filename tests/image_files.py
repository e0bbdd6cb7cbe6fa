"""Small data sets of images, written as they are published."""

import gzip
import lzma
import pickle
import struct
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image
from tests.corpora import TINY, TRAINING, merged

PACK = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}


def images(number, *, shape=(3, 32, 32), seed=0):
    return np.random.default_rng(seed).integers(0, 256, (number, *shape), dtype=np.uint8)


def coloured(labels, *, shape=(3, 32, 32), seed=0):
    """Images that tell their label by their colour, under some noise."""
    pixels = images(len(labels), shape=shape, seed=seed) // 4
    colours = np.stack((labels % 3, labels // 3 % 3, labels // 9), axis=1)[:, : shape[0], None, None]
    return (pixels + 90 * colours).astype(np.uint8)


def write(path: Path, content: bytes, ending: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(path.name + ending).write_bytes(PACK[ending](content))


def write_cifar10(folder, name, pixels, labels, ending=""):
    records = np.concatenate((labels[:, None].astype(np.uint8), pixels.reshape(len(pixels), -1)), axis=1)
    write(folder / name, records.tobytes(), ending)
    write(folder / "batches.meta.txt", b"".join(b"ten%d\n" % i for i in range(10)) + b"\n")


def write_cifar100(folder, name, pixels, labels, ending=""):
    """Fine labels as given; the coarse one is a fifth of it."""
    both = np.stack((labels // 5, labels), axis=1).astype(np.uint8)
    records = np.concatenate((both, pixels.reshape(len(pixels), -1)), axis=1)
    write(folder / name, records.tobytes(), ending)
    write(folder / "fine_label_names.txt", b"".join(b"fine%d\n" % i for i in range(100)))
    write(folder / "coarse_label_names.txt", b"".join(b"coarse%d\n" % i for i in range(20)))


class Python2Pickler(pickle._Pickler):
    """Writes bytes as Python 2 wrote its strings, and numpy under its old name: the published files."""

    dispatch = dict(pickle._Pickler.dispatch)

    def save_bytes(self, obj):
        self.write(pickle.BINSTRING + struct.pack("<i", len(obj)) + obj)
        self.memoize(obj)

    dispatch[bytes] = save_bytes

    def save_global(self, obj, name=None):
        module = obj.__module__.replace("numpy._core", "numpy.core")
        self.write(pickle.GLOBAL + f"{module}\n{obj.__name__}\n".encode())
        self.memoize(obj)

    dispatch[type(np.zeros(0).__reduce__()[0])] = save_global
    dispatch[type] = save_global
    dispatch[type(np.dtype)] = save_global


def pickled(table) -> bytes:
    file = BytesIO()
    Python2Pickler(file, protocol=2).dump(table)
    return file.getvalue()


def write_cifar_python(folder, name, pixels, labels, ending=""):
    """As CIFAR-100 comes; its coarse label is a fifth of the fine one."""
    table = {b"data": pixels.reshape(len(pixels), -1), b"fine_labels": labels.tolist()}
    write(folder / name, pickled(table | {b"coarse_labels": (labels // 5).tolist()}), ending)
    names = {b"fine_label_names": [b"fine%d" % i for i in range(100)]}
    write(folder / "meta", pickled(names | {b"coarse_label_names": [b"coarse%d" % i for i in range(20)]}))


def idx(array) -> bytes:
    magic = 0x0800 + array.ndim
    return struct.pack(f">{1 + array.ndim}i", magic, *array.shape) + array.astype(np.uint8).tobytes()


def write_idx(folder, name, pixels, labels, ending=""):
    write(folder / f"{name}-images-idx3-ubyte", idx(pixels[:, 0]), ending)
    write(folder / f"{name}-labels-idx1-ubyte", idx(labels), ending)


def write_folder(folder, name, pixels, labels, ending=""):
    """A folder a class, class0 to class9 whether or not it has images in this part."""
    for i, (image, label) in enumerate(zip(pixels, labels, strict=True)):
        path = folder / name / f"class{label}" / f"{i:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.transpose(1, 2, 0)).save(path)


WRITERS = {
    "cifar10": write_cifar10,
    "cifar100": write_cifar100,
    "cifar-python": write_cifar_python,
    "idx": write_idx,
    "folder": write_folder,
}


def cifar(folder, **counts):
    """Files train.bin and test.bin of CIFAR-10, each label of its own colour."""
    for seed, (name, count) in enumerate((counts or {"train": 80, "test": 20}).items()):
        labels = np.arange(count) % 10
        write_cifar10(folder, f"{name}.bin", coloured(labels, seed=seed), labels)
    return folder


def images_recipe(root, **sections):
    """A tiny classification of the fixture."""
    names = {"train": ["train.bin"], "test": ["test.bin"], "valid_every": 7}
    data = {"root": str(root), "format": "cifar10", **names}
    return merged({"task": "images", "model": {**TINY, "patch_size": 8}, "data": data, "training": TRAINING}, sections)
