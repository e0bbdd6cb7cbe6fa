import json
import shutil
from typing import get_args

import numpy as np
import pytest
import torch
from PIL import Image
from tests import image_files
from tests.image_files import WRITERS, coloured, images, images_recipe, write_folder, write_idx
from typer.testing import CliRunner

from splitstep import SplitstepForImageClassification
from splitstep.cli import app
from splitstep.data.batches import Piece, Plan, Stream
from splitstep.data.images import FORMATS
from splitstep.models.accounting import empty_model
from splitstep.models.presets import preset
from splitstep.recipe import load, recipe
from splitstep.solver.errors import UserError
from splitstep.tasks.images import Images, ImagesData
from splitstep.tasks.prediction import Predictor, tensors
from splitstep.training.engine import evaluate, train
from splitstep.training.optimizers import optimizer
from splitstep.training.ready import build, configuration
from splitstep.training.run import Run
from splitstep.training.trainer import Pieces
from splitstep.training.trials import check

DEIT = {
    "crop": "padded",
    "hflip": 0.5,
    "aa": "rand-m9-mstd0.5-inc1",
    "reprob": 0.25,
    "mixup": 0.8,
    "cutmix": 1.0,
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPLITSTEP_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def cifar(tmp_path):
    return image_files.cifar(tmp_path)


def images_of(root, **sections):
    whole = recipe(images_recipe(root, **sections))
    return Images(whole.data, whole.evaluation), whole


def test_every_format_can_be_asked_for():
    assert set(get_args(ImagesData.model_fields["format"].annotation)) == set(FORMATS)


def test_without_an_epoch_images_are_as_they_are(cifar):
    task, _ = images_of(cifar, data={"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4]})
    assert [len(task.lengths(split)) for split in task.splits] == [68, 12, 20]
    batch = task.batch("test", np.array([3, 1]))
    assert batch["pixel_values"].dtype == np.float32
    np.testing.assert_array_equal(batch["labels"], [3, 1])
    back = (
        batch["pixel_values"] * np.float32([0.2, 0.3, 0.4])[:, None, None] + np.float32([0.5, 0.4, 0.3])[:, None, None]
    )
    np.testing.assert_allclose(back * 255, coloured(np.arange(20) % 10, seed=1)[[3, 1]], atol=1e-3)


def test_what_is_held_out_is_not_trained_on(cifar):
    task, _ = images_of(cifar)
    seen = {x.tobytes() for x in task.batch("train", np.arange(68))["pixel_values"]}
    held_out = {x.tobytes() for x in task.batch("valid", np.arange(12))["pixel_values"]}
    assert len(seen) == 68
    assert len(held_out) == 12
    assert not seen & held_out


def test_training_images_have_mean_0_and_deviation_1(cifar):
    task, _ = images_of(cifar)
    pixels = task.batch("train", np.arange(68))["pixel_values"]
    np.testing.assert_allclose(pixels.mean((0, 2, 3)), 0, atol=1e-3)
    np.testing.assert_allclose(pixels.std((0, 2, 3)), 1, atol=1e-3)


def pieces(task, number, *, seed=1, repeats=1):
    plan = Plan(task.lengths("train"), seed, examples=16, repeats=repeats)
    return [task.training_batch(piece, seed=seed) for piece in Stream(plan, 6, pieces=number)]


@pytest.mark.parametrize("augmentation", [DEIT, {}, {"crop": "resized", "color_jitter": 0.4, "reprob": 0.5}])
@pytest.mark.parametrize("number", [2, 3, 16])
def test_an_update_is_the_same_however_it_is_cut(augmentation, number, cifar):
    task, _ = images_of(cifar, data={"augmentation": augmentation})
    whole, parts = pieces(task, 1), pieces(task, number)
    for i, update in enumerate(whole):
        cut = parts[i * number : (i + 1) * number]
        for name in ("pixel_values", "labels"):
            np.testing.assert_array_equal(np.concatenate([part[name] for part in cut]), update[name])
        assert sum(part["num_items"] for part in cut) == update["num_items"]


def test_an_image_does_not_depend_on_its_batch(cifar):
    task, _ = images_of(cifar, data={"augmentation": DEIT | {"mixup": 0.0, "cutmix": 0.0}})
    together = task.batch("train", np.arange(20), epoch=3, seed=1)["pixel_values"]
    alone = [task.batch("train", np.array([i]), epoch=3, seed=1)["pixel_values"][0] for i in range(20)]
    np.testing.assert_array_equal(together, alone)
    for other in ({"epoch": 4, "seed": 1}, {"epoch": 3, "seed": 2}):
        assert not np.array_equal(task.batch("train", np.arange(20), **other)["pixel_values"], together)


def test_an_image_shown_again_is_drawn_anew(cifar):
    task, _ = images_of(cifar, data={"augmentation": {"crop": "padded", "hflip": 0.5, "aa": DEIT["aa"]}})
    plan = Plan(task.lengths("train"), 1, examples=15, repeats=3)
    update = plan.epoch(0)[0]
    shown = task.training_batch(Piece(update, np.arange(15)), seed=1)["pixel_values"]
    assert len(set(update.indices.tolist())) == 5
    assert len({x.tobytes() for x in shown}) == 15


def test_mixed_labels_are_shares_of_the_update_read_backwards(cifar):
    task, _ = images_of(cifar, data={"augmentation": {"mixup": 0.8}})
    plan = Plan(task.lengths("train"), 1, examples=16)
    update = plan.epoch(0)[0]
    whole = Piece(update, np.arange(16))
    mixed = task.training_batch(whole, seed=1)
    plain = task.batch("train", update.indices)
    np.testing.assert_allclose(mixed["labels"].sum(1), 1, rtol=1e-6)
    share = mixed["labels"][plain["labels"] != plain["labels"][::-1]].max(1)
    assert np.ptp(share) < 1e-6
    rows = np.arange(16)
    own = mixed["labels"][rows, plain["labels"]]
    different = plain["labels"] != plain["labels"][::-1]
    blended = own[different][0] * plain["pixel_values"] + (1 - own[different][0]) * plain["pixel_values"][::-1]
    np.testing.assert_allclose(mixed["pixel_values"], blended, atol=1e-5)
    assert task.units(int(mixed["num_items"])) == 16


def test_images_are_brought_to_the_size_of_the_model(cifar):
    task, _ = images_of(cifar, data={"image_size": 48}, evaluation={"crop_ratio": 0.75})
    assert task.settings()["image_size"] == 48
    pixels = coloured(np.arange(20) % 10, seed=1)[0]
    expected = np.asarray(Image.fromarray(pixels.transpose(1, 2, 0)).resize((64, 64), Image.Resampling.BICUBIC))
    mean, std = (np.float32(values)[:, None, None] for values in task.normalization)
    shown = task.batch("test", np.array([0]))["pixel_values"][0] * std + mean
    np.testing.assert_allclose(shown * 255, expected.transpose(2, 0, 1)[:, 8:56, 8:56], atol=1e-3)
    assert task.batch("train", np.array([0]), epoch=0)["pixel_values"].shape == (1, 3, 48, 48)


@pytest.mark.parametrize("format", [*WRITERS, "digits"])
def test_every_format_is_checked_from_the_data_to_the_model(format, tmp_path):  # noqa: A002
    labels = np.arange(20) % 10
    shape = (1, 28, 28) if format == "idx" else (3, 32, 32)
    if format in WRITERS:
        for name in ("train", "test"):
            WRITERS[format](tmp_path, name, images(20, shape=shape), labels)
    data = {"format": format, "train": ["train"], "test": ["test"], "image_size": 32}
    whole = recipe(images_recipe(tmp_path, data=data | {"augmentation": DEIT}, training={"label_smoothing": 0.1}))
    report = check(whole)
    assert report["examples"]["test"] == (360 if format == "digits" else 20)
    assert np.isfinite(report["first_loss"])
    assert np.isfinite(report["validation_loss"])


@pytest.mark.parametrize("augmentation", [{}, {"mixup": 0.8, "cutmix": 1.0}])
def test_pieces_add_up_to_the_loss_of_the_update(augmentation, cifar):
    task, whole = images_of(cifar, data={"augmentation": augmentation})
    model = build(whole, configuration(whole, task)).eval()
    plan = Plan(task.lengths("train"), 1, examples=16)

    def loss(pieces):
        batches = [Pieces(task, 1).__getitems__(piece) for piece in Stream(plan, 1, pieces=pieces)]
        items = sum(int(batch.pop("num_items")) for batch in batches)
        return sum(model(**batch, num_items_in_batch=items, label_smoothing=0.1).loss for batch in batches)

    batch = tensors(task.training_batch(next(iter(Stream(plan, 1))), seed=1))
    logits = model(batch["pixel_values"]).logits
    expected = torch.nn.functional.cross_entropy(logits, batch["labels"], label_smoothing=0.1)
    for pieces in (1, 3, 20):  # of which four have no example of their own
        torch.testing.assert_close(loss(pieces), expected)


def test_updates_lower_the_loss_and_one_batch_is_learnt_by_heart(cifar):
    task, whole = images_of(cifar)
    model = build(whole, configuration(whole, task))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batch = tensors(task.batch("train", np.arange(16)))
    batch.pop("num_items")
    losses = []
    for _ in range(60):
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[0]
    assert losses[-1] < 0.1


def test_measuring_gives_accuracy_and_every_prediction(cifar):
    task, whole = images_of(cifar)
    model = build(whole, configuration(whole, task)).eval()
    predictor = Predictor(model)
    measured = task.measure(predictor, "test")
    batch = tensors(task.batch("test", np.arange(20)))
    with torch.no_grad():
        logits = model(batch["pixel_values"]).logits
    expected = logits.argmax(-1)
    assert [row["prediction"] for row in measured.examples] == [task.names[i] for i in expected]
    assert [row["label"] for row in measured.examples] == [f"ten{i % 10}" for i in range(20)]
    assert measured.metrics["accuracy"] == pytest.approx((expected == batch["labels"]).float().mean())
    assert measured.metrics["loss"] == pytest.approx(predictor.mean_loss(task, "test"), rel=1e-5)
    among = (logits.topk(5).indices == batch["labels"][:, None]).any(-1).float().mean()
    assert measured.metrics["top5"] == pytest.approx(among)


RUNS = {
    "cifar10": ({"train": ["train.bin"], "test": ["test.bin"]}, {}),
    "idx": ({"train": ["train"], "test": ["test"]}, {}),
    "folder": ({"train": ["train"], "test": ["test"], "image_size": 24}, {"crop_ratio": 0.75}),
}


SHAPES = {"cifar10": (3, 32, 32), "idx": (1, 28, 28), "folder": (3, 32, 40)}


@pytest.fixture(params=RUNS)
def trained(request, tmp_path):
    """A run for each kind of processor (colour, grey, cut out of a larger image), its recipe and its test images."""
    data, evaluation = RUNS[request.param]
    shape = SHAPES[request.param]
    for part, number in {"train": 40, "test": 20}.items():
        labels = np.sort(np.arange(number) % 10)
        pixels = coloured(labels, shape=shape)
        WRITERS[request.param](tmp_path / "data", data[part][0], pixels, labels)
    named = {"format": request.param, "augmentation": {"crop": "padded", "mixup": 0.2}}
    training = {"updates": 6, "label_smoothing": 0.1, "micro_batches": 2, "evaluate_every": 3}
    model = {"patch_size": 7 if request.param == "idx" else 8}
    whole = recipe(
        images_recipe(tmp_path / "data", data=data | named, training=training, model=model, evaluation=evaluation)
    )
    train(whole, tmp_path / "run", say=lambda line: None)
    return Run(tmp_path / "run"), whole, [Image.fromarray(x.transpose(1, 2, 0).squeeze()) for x in pixels]


def _saved(image, path):
    image.save(path)
    return str(path)


def test_the_pipeline_of_transformers_and_classify_predict_what_evaluation_does(trained, tmp_path):
    from transformers import pipeline

    run, whole, shown = trained
    classify = pipeline("image-classification", model=str(run.model), device="cpu")
    task = Images(whole.data, whole.evaluation, folder=run.model)
    made = classify.image_processor(images=shown, return_tensors="np")["pixel_values"]
    np.testing.assert_allclose(made, task.batch("test", np.arange(20))["pixel_values"], atol=1e-5)
    rows = map(json.loads, (run.folder / "predictions-test.jsonl").read_text().splitlines())
    answers = [classify(image)[0] for image in shown]
    assert [answer["label"] for answer in answers] == [row["prediction"] for row in rows]
    shutil.move(tmp_path / "data", tmp_path / "away")  # a model is used without its data
    given = "\n".join(_saved(image, tmp_path / f"{number}.png") for number, image in enumerate(shown))
    told = CliRunner().invoke(app, ["classify", str(run.folder)], input=given).stdout.splitlines()
    assert [line.split("\t")[0] for line in told] == [answer["label"] for answer in answers]
    np.testing.assert_allclose([float(line.split("\t")[1]) for line in told], [a["score"] for a in answers], atol=1e-4)
    shutil.move(tmp_path / "away", tmp_path / "data")
    metrics = evaluate(run, whole, "test", say=lambda line: None)["metrics"]
    assert metrics == run.results()["metrics"]["test"]


def test_a_line_that_names_no_image_is_told_with_its_number(cifar, tmp_path):
    train(recipe(images_recipe(cifar)), tmp_path / "run", say=lambda line: None)
    (tmp_path / "text.png").write_text("no image")
    answer = CliRunner().invoke(app, ["classify", str(tmp_path / "run")], input=f"\n{tmp_path / 'text.png'}\n")
    assert isinstance(answer.exception, UserError)
    assert str(answer.exception).startswith(f"line 2: {tmp_path / 'text.png'} cannot be read as an image")


def test_a_model_of_other_labels_is_refused(cifar, tmp_path):
    whole = recipe(images_recipe(cifar))
    train(whole, tmp_path / "run", say=lambda line: None)
    write_idx(tmp_path / "digits", "train", images(20, shape=(1, 32, 32)), np.arange(20) % 10)
    other = recipe(images_recipe(tmp_path / "digits", data={"format": "idx", "train": ["train"], "test": ["train"]}))
    with pytest.raises(
        UserError, match=r"the labels of the data, 0, 1, 2, ... \(10\), are not the model's, ten0, ten1"
    ):
        evaluate(Run(tmp_path / "run"), other, "test", say=lambda line: None)


def unequal_sides(root):
    write_idx(root, "train", images(20, shape=(1, 8, 6)), np.arange(20) % 10)


def unknown_class(root):
    write_folder(root, "train", images(4), np.arange(4))
    write_folder(root, "test", images(5), np.arange(5))


def nothing(root):
    return None


@pytest.mark.parametrize(
    ("prepare", "data", "complaint"),
    [
        (nothing, {"format": "folder"}, "data.format = 'folder' needs data.image_size"),
        (nothing, {"labels": "coarse"}, "data.labels = 'coarse' is for CIFAR-100, not for data.format = 'cifar10'"),
        (nothing, {"valid": ["test.bin"]}, "data.valid names files, so data.valid_every holds nothing out"),
        (nothing, {"format": "png"}, "data.format: input should be 'cifar10'"),
        (nothing, {"folder": "cifar"}, r"the folder .*cifar \(data.folder\) does not exist"),
        (nothing, {}, "no file .*batches.meta.txt, nor with .gz or .xz"),
        (nothing, {"augmentation": {"aa": "auto"}}, "data.augmentation.aa: aa is 'none' or one like"),
        (
            unequal_sides,
            {"format": "idx", "train": ["train"], "test": ["train"]},
            "the images are 8 x 6; data.image_size makes them square",
        ),
        (
            unknown_class,
            {"format": "folder", "image_size": 16, "train": ["train"], "test": ["test"]},
            "unknown class 'class4'; choose from class0, class1, class2, class3",
        ),
        (
            unknown_class,
            {"format": "folder", "image_size": 32, "train": ["train"], "test": ["train"], "mean": [0.5]},
            "data.mean has 1 numbers and the images have 3 channels",
        ),
    ],
)
def test_a_wrong_recipe_is_one_line(prepare, data, complaint, tmp_path):
    prepare(tmp_path)
    with pytest.raises(UserError, match=complaint):
        check(recipe(images_recipe(tmp_path, data={"valid_every": 2} | data)))


def test_reading_a_recipe_needs_no_torch():
    import subprocess
    import sys

    code = "import sys, splitstep.tasks.images; assert 'torch' not in sys.modules and 'sklearn' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_model_knows_its_labels(cifar):
    task, whole = images_of(cifar)
    config = configuration(whole, task)
    assert config.num_labels == 10
    assert config.id2label[3] == "ten3"
    assert isinstance(build(whole, config), SplitstepForImageClassification)


def test_weight_decay_spares_what_is_no_matrix(cifar):
    task, whole = images_of(cifar, training={"decay": "matrices", "weight_decay": 0.05})
    model = build(whole, configuration(whole, task))
    decayed, spared = optimizer(model, whole.training).param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.05, 0.0)
    kept = {id(p) for p in spared["params"]}
    names = {name for name, p in model.named_parameters() if id(p) in kept}
    assert {name.rpartition(".")[2] for name in names} == {"weight", "bias", "positions", "class_token"}
    assert all("norm" in name for name in names if name.endswith("weight"))


def test_the_models_of_the_parallel_paper_have_its_numbers_of_parameters():
    runs = [run for _, run in load("parallel/cifar100-sharing")]
    rows = runs[0].published["rows"]
    for run, row in zip(runs, rows, strict=True):
        assert run.model["num_independent_layers"] == row["model.num_independent_layers"]
        sizes = {key: value for key, value in run.model.items() if key != "preset"}
        model = empty_model(preset("parallel", "image", num_labels=100, **sizes))
        assert round(sum(p.numel() for p in model.parameters()) / 1e6, 1) == row["million_parameters"]
