"""The files of GLUE: every row that is published is read, and nothing else."""

import pytest
from tests import corpora

from splitstep.data.files import Reading
from splitstep.data.glue import GLUE
from splitstep.data.labelled import examples
from splitstep.data.places import data_folder
from splitstep.solver.errors import UserError


def read(root, name, split, **options):
    task = GLUE[name]
    return list(examples(task.choice, root / "glue", f"{name}/{task.files[split]}", **options))


@pytest.mark.parametrize("name", GLUE)
def test_every_row_is_read_as_it_stands(tmp_path, name):
    root = corpora.glue(tmp_path, train=7, valid=4)
    found = read(root, name, "train")
    assert len(found) == 7
    known = [*GLUE[name].names.values()] or ["1.000", "4.500"]
    assert [example.label for example in found] == [known[i % len(known)] for i in range(7)]
    assert all(text.split()[1] == '"quoted' for example in found for text in example.texts)
    assert {len(example.texts) for example in found} == {len(GLUE[name].texts)}
    assert len(read(root, name, "valid")) == 4


@pytest.mark.parametrize("name", GLUE)
def test_a_malformed_row_is_named_with_its_line_and_skipped_only_when_asked(tmp_path, name):
    root = corpora.glue(tmp_path, train=7)
    path = root / "glue" / name / "train.tsv"
    rows = path.read_text(encoding="utf-8").split("\n")
    rows[3] = rows[3].rpartition("\t")[0]
    path.write_text("\n".join(rows), encoding="utf-8")
    width = len(corpora.GLUE_COLUMNS[name])
    complaint = f"{name}/train.tsv, line 4: {width - 1} columns instead of {width}"
    with pytest.raises(UserError, match=complaint):
        read(root, name, "train")
    said = []
    assert len(read(root, name, "train", reading=Reading("skip", said.append))) == 6
    assert len(said) == 1
    assert "1 of 7 rows" in said[0]
    assert complaint in said[0]


def test_labels_and_columns_that_are_none_are_refused(tmp_path):
    root = corpora.glue(tmp_path, train=3)
    path = root / "glue" / "RTE" / "train.tsv"
    path.write_text(path.read_text().replace("not_entailment", "maybe"))
    with pytest.raises(UserError, match="line 3: label 'maybe' is none of entailment, not_entailment"):
        read(root, "RTE", "train")
    path.write_text(path.read_text().replace("sentence2", "sentence3"))
    with pytest.raises(UserError, match="line 1: no column 'sentence2' among index, sentence1, sentence3, label"):
        read(root, "RTE", "train")
    path.write_bytes(path.read_text().encode("utf-16"))
    with pytest.raises(UserError, match=r"RTE/train.tsv, line 1: not utf-8 at byte 1"):
        read(root, "RTE", "train")


COUNTS = {
    "CoLA": (7951, 1043),
    "SST-2": (67349, 872),
    "MRPC": (3668, 408),
    "STS-B": (5749, 1500),
    "QQP": (18823, 1500),
    "MNLI": (9999, 4967),
    "QNLI": (9999, 2732),
    "RTE": (2240, 277),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GLUE)
def test_the_files_of_the_data_folder_have_their_number_of_rows(name):
    assert tuple(len(read(data_folder(None, ""), name, split)) for split in ("train", "valid")) == COUNTS[name]
