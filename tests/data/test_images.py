import pickle

import numpy as np
import pytest
from PIL import Image
from tests.image_files import WRITERS, idx, images, pickled, write, write_cifar10, write_cifar100, write_idx

from splitstep.data.images import FORMATS, Place, as_image, as_pixels, read, squared, unpickled
from splitstep.solver.errors import UserError

LABELS = np.arange(10)


def reading(format, folder, *, files=("train",), labels="fine", size=32):  # noqa: A002
    row, place = FORMATS[format], Place(folder, labels, size)
    names = row.names(place, list(files))
    return read(row, place, list(files), names), names


def shape(format):  # noqa: A002
    return (1, 28, 28) if format == "idx" else (3, 32, 32)


@pytest.mark.parametrize("ending", ["", ".gz", ".xz"])
@pytest.mark.parametrize("format", WRITERS)
def test_what_was_written_is_read(format, ending, tmp_path):  # noqa: A002
    pixels = images(10, shape=shape(format))
    WRITERS[format](tmp_path, "train", pixels, LABELS, ending)
    pictures, names = reading(format, tmp_path)
    assert pictures.pixels.dtype == np.uint8
    np.testing.assert_array_equal(pictures.pixels, pixels)
    np.testing.assert_array_equal(pictures.labels, LABELS)
    assert len(names) > max(LABELS)


def test_every_format_is_tested():
    assert set(FORMATS) == {*WRITERS, "digits"}


@pytest.mark.parametrize("format", ["cifar100", "cifar-python"])
def test_coarse_labels(format, tmp_path):  # noqa: A002
    WRITERS[format](tmp_path, "train", images(10), LABELS)
    pictures, names = reading(format, tmp_path, labels="coarse")
    np.testing.assert_array_equal(pictures.labels, LABELS // 5)
    assert names == [f"coarse{i}" for i in range(20)]


def test_cifar10_as_python_calls_its_labels_just_labels(tmp_path):
    pixels = images(10)
    write(tmp_path / "data_batch_1", pickled({b"data": pixels.reshape(10, -1), b"labels": LABELS.tolist()}))
    write(tmp_path / "batches.meta", pickled({b"label_names": [b"ten%d" % i for i in range(10)]}))
    pictures, names = reading("cifar-python", tmp_path, files=["data_batch_1"])
    np.testing.assert_array_equal(pictures.pixels, pixels)
    assert names[9] == "ten9"


def test_files_are_read_one_after_the_other(tmp_path):
    pixels = images(10)
    write_cifar10(tmp_path, "one.bin", pixels[:4], LABELS[:4])
    write_cifar10(tmp_path, "two.bin", pixels[4:], LABELS[4:], ".xz")
    pictures, _ = reading("cifar10", tmp_path, files=["one.bin", "two.bin"])
    np.testing.assert_array_equal(pictures.pixels, pixels)


def test_the_digits_are_split_once_and_for_all():
    (train, names), (test, _) = (reading("digits", None, files=[part]) for part in ("train", "test"))
    assert (len(train), len(test), len(names)) == (1437, 360, 10)
    assert train.pixels.shape[1:] == (1, 8, 8)
    assert train.pixels.max() == 255
    assert set(test.labels) == set(range(10))


def test_images_of_a_folder_become_squares_of_one_size(tmp_path):
    for name, size in {"a": (40, 60), "b": (90, 45)}.items():
        (tmp_path / "train" / name).mkdir(parents=True)
        Image.new("L", size, 7).save(tmp_path / "train" / name / "1.jpg")
    pictures, names = reading("folder", tmp_path, size=24)
    assert pictures.pixels.shape == (2, 3, 24, 24)
    assert names == ["a", "b"]
    assert (pictures.pixels == 7).all()


@pytest.mark.parametrize("channels", [1, 3])
def test_pillow_and_back(channels):
    pixels = images(1, shape=(channels, 5, 7))[0]
    np.testing.assert_array_equal(as_pixels(as_image(pixels)), pixels)


def test_the_middle_of_an_image():
    pixels = images(1, shape=(3, 32, 40))[0]
    np.testing.assert_array_equal(squared(as_image(pixels), 32), pixels[:, :, 4:36])


def cut_cifar(folder):
    write(folder / "train", images(2).tobytes()[:5000])
    write(folder / "batches.meta.txt", b"a\nb\n")


def wrong_magic(folder):
    write_idx(folder, "train", images(2, shape=(1, 4, 4)), LABELS[:2])
    write(folder / "train-images-idx3-ubyte", idx(LABELS))


def cut_idx(folder):
    write_idx(folder, "train", images(2, shape=(1, 4, 4)), LABELS[:2])
    write(folder / "train-images-idx3-ubyte", idx(images(2, shape=(4, 4)))[:-3])


def short_idx(folder):
    write_idx(folder, "train", images(2, shape=(1, 4, 4)), LABELS[:2])
    write(folder / "train-images-idx3-ubyte", b"\0\0")


def unequal_counts(folder):
    write_idx(folder, "train", images(3, shape=(1, 4, 4)), LABELS[:2])


def empty_file(folder):
    write_cifar10(folder, "train", images(1), LABELS[:1])
    write(folder / "train", b"")


def no_images(folder):
    write_idx(folder, "train", images(0, shape=(1, 4, 4)), LABELS[:0])


def cut_archive(folder):
    write_cifar10(folder, "train", images(3), LABELS[:3], ".gz")
    archive = folder / "train.gz"
    archive.write_bytes(archive.read_bytes()[:-500])


def wrong_label(folder):
    write_cifar100(folder, "train", images(3), np.array([1, 100, 2]))


def unequal_python(folder):
    WRITERS["cifar-python"](folder, "train", images(3), LABELS[:2])


def no_data(folder):
    WRITERS["cifar-python"](folder, "train", images(3), LABELS[:3])
    write(folder / "train", pickled({b"fine_labels": [1]}))


def no_dictionary(folder):
    WRITERS["cifar-python"](folder, "train", images(3), LABELS[:3])
    write(folder / "train", pickled([1, 2]))


def floats(folder):
    WRITERS["cifar-python"](folder, "train", images(3), LABELS[:3])
    write(folder / "train", pickled({b"data": np.zeros((3, 3072)), b"fine_labels": [1, 2, 3]}))


def no_classes(folder):
    (folder / "train").mkdir()


def no_files(folder):
    (folder / "train" / "cat").mkdir(parents=True)


def no_image(folder):
    write(folder / "train" / "cat" / "1.png", b"not a picture")


@pytest.mark.parametrize(
    ("spoil", "format", "complaint"),
    [
        (cut_cifar, "cifar10", r"train is cut short: record 2 has 1,927 of 3,073 bytes"),
        (wrong_magic, "idx", r"train-images-idx3-ubyte begins with the magic number 2049, not with 2051"),
        (cut_idx, "idx", r"train-images-idx3-ubyte: the header says 2 x 4 x 4 bytes, and 29 bytes follow it"),
        (short_idx, "idx", r"train-images-idx3-ubyte begins with the magic number 0, not with 2051"),
        (unequal_counts, "idx", r"images-idx3-ubyte has 3 images and .*train-labels-idx1-ubyte has 2 labels"),
        (empty_file, "cifar10", r"train is empty"),
        (no_images, "idx", r"holds no images"),
        (cut_archive, "cifar10", r"train.gz is damaged or cut short"),
        (wrong_label, "cifar100", r"train, record 2: label 100 is none of 0 to 99"),
        (unequal_python, "cifar-python", r"train has 3 images and 2 labels"),
        (no_data, "cifar-python", r"train has no data, only fine_labels"),
        (no_dictionary, "cifar-python", r"train is no CIFAR pickle: it holds no dictionary"),
        (floats, "cifar-python", r"train: data are float64 of \(3, 3072\)"),
        (no_classes, "folder", r"train has no folder for each class"),
        (no_files, "folder", r"cat has no image files"),
        (no_image, "folder", r"1.png cannot be read as an image"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_one_line(spoil, format, complaint, tmp_path):  # noqa: A002
    spoil(tmp_path)
    with pytest.raises(UserError, match=complaint) as error:
        reading(format, tmp_path)
    assert "\n" not in str(error.value)


def test_a_label_that_training_never_saw_is_refused(tmp_path):
    write_idx(tmp_path, "train", images(3, shape=(1, 4, 4)), LABELS[:3])
    write_idx(tmp_path, "test", images(3, shape=(1, 4, 4)), LABELS[2:5])
    row, place = FORMATS["idx"], Place(tmp_path)
    with pytest.raises(UserError, match="test-labels-idx1-ubyte, record 2: label 3 is none of 0 to 2"):
        read(row, place, ["test"], row.names(place, ["train"]))


def test_images_of_two_sizes_do_not_go_together(tmp_path):
    write_idx(tmp_path, "train", images(2, shape=(1, 4, 4)), LABELS[:2])
    write_idx(tmp_path, "more", images(2, shape=(1, 5, 4)), LABELS[:2])
    with pytest.raises(UserError, match=r"train has images of 1 x 4 x 4 and .*more of 1 x 5 x 4"):
        reading("idx", tmp_path, files=["train", "more"])


class Evil:
    """Calls what it was made with when it is unpickled."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 5])
@pytest.mark.parametrize("wanted", ["builtins.exec", "posix.system", "builtins.getattr", "numpy.load"])
def test_a_pickle_that_would_run_code_is_refused(wanted, protocol, tmp_path):
    import importlib

    module, _, name = wanted.rpartition(".")
    trace = tmp_path / "trace"
    arguments = {"exec": (f"open({str(trace)!r}, 'w')",), "system": (f"touch {trace}",)}.get(name, (str(trace), "x"))
    content = pickle.dumps({b"data": Evil(getattr(importlib.import_module(module), name), *arguments)}, protocol)
    write(tmp_path / "train", content)
    with pytest.raises(UserError, match="train is no CIFAR pickle: it asks for ") as error:
        unpickled(tmp_path / "train")
    assert not trace.exists()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"\x80", b"not a pickle", b"\x80\x04c\n", pickled({b"data": LABELS})[:-20]])
def test_a_damaged_pickle_is_one_line(content, tmp_path):
    write(tmp_path / "train", content)
    with pytest.raises(UserError, match="train is no CIFAR pickle: "):
        unpickled(tmp_path / "train")
