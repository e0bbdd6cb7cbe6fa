"""Labelled examples: every row of a file, none of another; what is malformed is named with its place."""

import gzip
import io
import lzma
import math
import tarfile
from dataclasses import replace

import numpy as np
import pytest
from tests import published
from tests.image_files import write_cifar10

from splitstep.data import archives
from splitstep.data.archives import npz_arrays, tar_files
from splitstep.data.files import Reading
from splitstep.data.labelled import FORMATS, Choice, checksums, examples
from splitstep.solver.errors import UserError

PACK = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}
REVIEWS = {
    "train/pos/0_9.txt": "Good, très bon.<br />Yes",
    "train/pos/10_7.txt": "Fine",
    "train/neg/2_1.txt": "Bad",
    "test/pos/0_10.txt": "Best",
    "test/neg/1_2.txt": "Worst",
}


def tar(files, root="aclImdb"):
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(f"{root}/{name}" if root else name)
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    return raw.getvalue()


def read(folder, name, file, **options):
    choice = Choice.of(name, options.pop("texts", None), options.pop("label", None))
    return [(example.texts, example.label) for example in examples(choice, folder, file, **options)]


# Each format: a writer of a small file, and the examples that are in it.


def _ag_news(folder):
    (folder / "classes.txt").write_text("World\nSports\n")
    (folder / "x").write_text('"2","A ""b"", c","one\\two \\$5"\n"1","T","d\\\\"\n')
    return [(("one two $5",), "Sports"), (("d",), "World")]


def _imdb(folder):
    (folder / "x.tar.gz").write_bytes(gzip.compress(tar({"x/neg/1_2.txt": "bad", "x/pos/0_9.txt": "gut ü"}, root="")))
    return [(("bad",), "neg"), (("gut ü",), "pos")]


def _trec(folder):
    (folder / "x").write_bytes("DESC:manner How did it ?\nHUM:ind Who is É ?\n".encode("latin-1"))
    return [(("How did it ?",), "DESC"), (("Who is É ?",), "HUM")]


def _listops(folder):
    (folder / "x").write_text("Source\tTarget\r\n( ( ( [MAX 1 ) 2 ) ] )\t2\r\n")
    return [(("( ( ( [MAX 1 ) 2 ) ] )",), "2")]


def _listops_nyu(folder):
    (folder / "x").write_text("2\t( ( ( [MAX 1 ) 2 ) ] )\n")
    return [(("( ( ( [MAX 1 ) 2 ) ] )",), "2")]


def _pathfinder(folder):
    np.savez(folder / "x.npz", x=np.asarray([[[0, 255], [7, 8]], [[1, 2], [3, 4]]], np.uint8), y=np.asarray([1, 0]))
    (folder / "x.npz").rename(folder / "x")
    return [(("0 255 7 8",), "connected"), (("1 2 3 4",), "apart")]


def _cifar10_grey(folder):
    pixels = np.zeros((2, 3, 32, 32), np.uint8)
    pixels[0] = 255
    pixels[1, 0] = 100  # red alone: 0.2989 of it
    write_cifar10(folder, "x", pixels, np.asarray([1, 0]))
    return [((" ".join(["255"] * 1024),), "ten1"), ((" ".join(["30"] * 1024),), "ten0")]


def _aan(folder):
    (folder / "x").write_text("1.0\tP1\tP2\tone text\tanother\n0\tP3\tP4\tc\td\n")
    return [(("one text", "another"), "cites"), (("c", "d"), "unrelated")]


def _csv(folder):
    (folder / "x").write_text('id,label,text\n1,yes,"one, ""two""\nthree"\r\n\n2,no,ü\n')
    return [(('one, "two"\nthree',), "yes"), (("ü",), "no")]


def _tsv(folder):
    (folder / "x").write_text('text\tlabel\n"one, two\t1\nü\t0\n')
    return [(('"one, two',), "1"), (("ü",), "0")]


def _jsonl(folder):
    (folder / "x").write_text('{"text": "one\\ntwo", "label": 1, "more": [1]}\n{"label": "b", "text": "ü"}\n')
    return [(("one\ntwo",), "1"), (("ü",), "b")]


WRITERS = {
    "csv": _csv,
    "tsv": _tsv,
    "jsonl": _jsonl,
    "ag-news": _ag_news,
    "imdb": _imdb,
    "trec": _trec,
    "listops": _listops,
    "listops-nyu": _listops_nyu,
    "pathfinder": _pathfinder,
    "cifar10-grey": _cifar10_grey,
    "aan": _aan,
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_row_is_read_as_it_stands(name, tmp_path):
    assert WRITERS[name](tmp_path) == read(tmp_path, name, "x")
    assert checksums(Choice.of(name, None, None), tmp_path, "x")


def test_columns_are_chosen_by_name_and_joined_with_a_plus(tmp_path):
    _ag_news(tmp_path)
    assert read(tmp_path, "ag-news", "x", texts=["title+description"])[0][0] == ('A "b", c one two $5',)
    assert read(tmp_path, "ag-news", "x", texts=["title", "description"])[1][0] == ("T", "d")
    _trec(tmp_path)
    assert [label for _, label in read(tmp_path, "trec", "x", label="fine")] == ["DESC:manner", "HUM:ind"]
    with pytest.raises(UserError, match=r"unknown data.(texts|label) 'coars'; .*did you mean 'coarse'"):
        Choice.of("trec", None, "coars")
    with pytest.raises(UserError, match=r"unknown data.format 'ag_news'; .*did you mean 'ag-news'"):
        Choice.of("ag_news", None, None)


@pytest.mark.parametrize(
    ("name", "bad", "complaint"),
    [
        ("csv", "1,2", "2 columns instead of 3"),
        ("csv", '1,a,"b" c', "no row of a table"),
        ("csv", '1,a,"open', "no row of a table"),
        ("csv", "1,a,\0", "a NUL byte in a text"),
        ("tsv", "a\tb\tc", "3 columns instead of 2"),
        ("jsonl", "{", "no JSON"),
        ("jsonl", "[1]", "no JSON object"),
        ("jsonl", "[" * 10**5, "no JSON"),
        ("jsonl", '{"text": null, "label": 1}', "unknown data.texts 'text'"),
        ("ag-news", '"1","only two"', "2 columns instead of 3"),
        ("ag-news", '"3","T","d"', "label '3' is none of 1, 2"),
        ("ag-news", '"1","T","open', "no row of comma-separated values"),
        ("ag-news", "", "0 columns instead of 3"),
        ("trec", "no label here", "no COARSE:fine label and question"),
        ("trec", "DESC:manner ", "no COARSE:fine label and question"),
        ("trec", ":manner How ?", "no COARSE:fine label and question"),
        ("listops", "( [MAX 1 ) ] )\t12", "no expression and digit with a tab"),
        ("listops", "FOO 1 ]\t3", "'FOO' is no symbol of ListOps"),
        ("listops", "( [MAX 1 ) 12", "no expression and digit with a tab"),
        ("listops-nyu", "12\t( [MAX 1 )", "no expression and digit with a tab"),
        ("aan", "1.0\tP1\tP2\tone text", "4 columns instead of 5"),
        ("aan", "2\tP1\tP2\ta\tb", "label '2' is none of 0, 1"),
    ],
)
def test_a_malformed_row_is_named_with_its_line_or_counted_and_left_out(name, bad, complaint, tmp_path):
    good = WRITERS[name](tmp_path)
    with (tmp_path / "x").open("a") as file:
        file.write(f"{bad}\n")
    number = len((tmp_path / "x").read_bytes().splitlines())
    with pytest.raises(UserError, match=rf"x, line {number}: {complaint}"):
        read(tmp_path, name, "x")
    said = []
    assert read(tmp_path, name, "x", reading=Reading("skip", said.append)) == good
    (note,) = said
    assert note.startswith(f"1 of {len(good) + 1} rows of x are malformed and left out; the first: ")


def test_a_table_of_ones_own_has_a_header_and_columns_of_any_name(tmp_path):
    (tmp_path / "x").write_text("premise,hypothesis,score\na,b,0.5\n")
    chosen = {"texts": ["premise", "hypothesis"], "label": "score"}
    assert read(tmp_path, "csv", "x", **chosen) == [(("a", "b"), "0.5")]
    with pytest.raises(UserError, match=r"x, line 2: unknown data.texts 'premis'; .*did you mean 'premise'"):
        read(tmp_path, "csv", "x", texts=["premis"], label="score")
    (tmp_path / "x").write_text("text,text\na,b\n")
    with pytest.raises(UserError, match="x, line 1: the header has to name each column once, got 'text', 'text'"):
        read(tmp_path, "csv", "x")
    (tmp_path / "x").write_text("text,\0label\na,b\nc,d\n")
    with pytest.raises(UserError, match="x, line 1: a NUL byte in a text"):
        read(tmp_path, "csv", "x", reading=Reading("skip"))


def test_a_listops_file_without_its_header_is_another_file(tmp_path):
    (tmp_path / "x").write_text("( [MAX 1 ) ] )\t1\n")
    with pytest.raises(UserError, match=r"x, line 1: the header is .*not 'Source\\tTarget'"):
        read(tmp_path, "listops", "x")
    (tmp_path / "x").write_bytes(b"\xff\n")
    with pytest.raises(UserError, match=r"x, line 1: not utf-8"):
        read(tmp_path, "listops", "x")


def test_a_quotation_mark_that_is_never_closed_costs_its_own_row_alone(tmp_path):
    rows = [f'{number},"text, {number}\nof two lines"' for number in range(5000)]
    rows[7], rows[4000] = '7,"open', '4000,"open'
    (tmp_path / "x").write_text("label,text\n" + "\n".join(rows) + "\n")
    said = []
    found = read(tmp_path, "csv", "x", reading=Reading("skip", said.append))
    labels = {label for _, label in found}
    assert labels == {str(number) for number in range(5000)} - {"7", "4000"}
    assert "x, line 16: no row of a table" in said[0]


def test_labels_that_are_numbers_keep_no_names(tmp_path):
    _ag_news(tmp_path)
    choice = replace(Choice.of("ag-news", None, None), numbers=(-math.inf, math.inf))
    assert [example.label for example in examples(choice, tmp_path, "x")] == ["2", "1"]


def test_a_number_that_no_loss_counts_is_refused(tmp_path):
    (tmp_path / "x").write_text("label,text\n1.5,a\n-100,b\n")
    choice = replace(Choice.of("csv", None, None), numbers=(-math.inf, math.inf))
    with pytest.raises(UserError, match=r"line 3: the label -100 marks what no loss counts"):
        list(examples(choice, tmp_path, "x"))


def test_reviews_are_the_same_from_a_folder_and_from_its_archives(tmp_path):
    for name, text in REVIEWS.items():
        path = tmp_path / "folder" / "aclImdb" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "folder" / "aclImdb" / "train" / "urls.txt").write_text("http://")
    expected = [(("Bad",), "neg"), (("Good, très bon.<br />Yes",), "pos"), (("Fine",), "pos")]
    assert read(tmp_path / "folder", "imdb", "aclImdb/train") == expected
    assert list(checksums(Choice.of("imdb", None, None), tmp_path / "folder", "aclImdb/train")) == ["aclImdb/train"]
    others = {**REVIEWS, "train/unsup/5_0.txt": "unlabelled", "README": "read me"}
    for stem in ("aclImdb", "aclImdb_v1"):
        for ending, pack in PACK.items():
            folder = tmp_path / f"{stem}{ending}"
            folder.mkdir()
            root = "aclImdb" if ending else "./aclImdb"  # as tar writes it that is told so
            (folder / f"{stem}.tar{ending}").write_bytes(pack(tar(others, root=root)))
            assert read(folder, "imdb", "aclImdb/train") == expected
            assert [label for _, label in read(folder, "imdb", "aclImdb/test", label="rating")] == ["2", "10"]


def _special(kind, name="aclImdb/train/pos/1_9.txt", target="/etc/passwd"):
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        entry = tarfile.TarInfo(name)
        entry.type, entry.linkname = kind, target
        archive.addfile(entry)
    return raw.getvalue()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (tar({"/etc/pos/1_9.txt": "x"}, root=""), "leads out of the archive's own folder"),
        (tar({"aclImdb/../../pos/1_9.txt": "x"}, root=""), "leads out of the archive's own folder"),
        (_special(tarfile.SYMTYPE), "neither file nor folder but a link or a device"),
        (_special(tarfile.LNKTYPE), "neither file nor folder but a link or a device"),
        (_special(tarfile.FIFOTYPE), "neither file nor folder but a link or a device"),
        (b"no archive at all" * 100, "is no tar archive, or damaged"),
        (tar(REVIEWS)[:2000], "is no tar archive, or damaged"),
    ],
)
def test_harmful_and_damaged_archives_are_refused(content, complaint, tmp_path):
    (tmp_path / "aclImdb.tar").write_bytes(content)
    with pytest.raises(UserError, match=complaint):
        read(tmp_path, "imdb", "aclImdb/train")


def test_an_archive_that_unpacks_to_far_more_than_its_size_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "SMALLEST_LIMIT", 1000)
    (tmp_path / "a.tar.xz").write_bytes(lzma.compress(tar({"train/pos/0_9.txt": "x" * 1_000_000})))
    with pytest.raises(UserError, match="100 times its size; it is not read"):
        list(tar_files(tmp_path / "a.tar.xz", lambda name: True))
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros(1_000_000, np.uint8))
    with pytest.raises(UserError, match="100 times its size; it is not read"):
        npz_arrays(tmp_path / "a.npz", "x")


def test_arrays_of_objects_and_wrong_shapes_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.asarray([{"a": 1}], dtype=object), y=np.zeros(1))
    with pytest.raises(UserError, match=r"a\.npz is not read: Object arrays cannot be loaded"):
        npz_arrays(tmp_path / "a.npz", "x")
    with pytest.raises(UserError, match=r"a\.npz has no array z, only x, y"):
        npz_arrays(tmp_path / "a.npz", "z")
    np.savez(tmp_path / "b.npz", x=np.zeros((2, 4, 4)), y=np.zeros(2))
    with pytest.raises(UserError, match=r"x is float64 \(2, 4, 4\) and y \(2,\), not uint8"):
        read(tmp_path, "pathfinder", "b.npz")
    (tmp_path / "c.npz").write_bytes((tmp_path / "b.npz").read_bytes()[:100])
    with pytest.raises(UserError, match=r"c\.npz is no npz file, or damaged"):
        read(tmp_path, "pathfinder", "c.npz")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "name", "counts"),
    [
        ("ag_news_csv", "ag-news", {"train.csv": 10_429, "test.csv": 3_800}),
        ("imdb", "imdb", {"aclImdb/train": 10_000, "aclImdb/test": 4_000}),
        ("trec", "trec", {"train_5500.label": 5_452}),
        ("lra_listops", "listops", {"basic_train.tsv": 5_000, "basic_val.tsv": 500, "short_train.tsv": 12_000}),
        ("listops_nyu", "listops-nyu", {"test_d20s.part8000.tsv": 8_000}),
        ("lra_pathfinder", "pathfinder", {"pathfinder32_train.npz": 9_000, "pathfinder32_test.npz": 1_000}),
        ("cifar-10-batches-bin", "cifar10-grey", {"data_batch_1.bin": 5_000, "test_batch.bin": 2_000}),
    ],
)
def test_published_files_have_their_published_numbers_of_rows(folder, name, counts):
    for file, count in counts.items():
        assert len(read(published.folder(folder), name, file)) == count
