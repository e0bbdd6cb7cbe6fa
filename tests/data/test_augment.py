import numpy as np
import pytest
from tests.image_files import images

from splitstep.data.augment import (
    CROPS,
    OPERATIONS,
    Augmentation,
    augmented,
    erase,
    image_generator,
    mixture,
    rand_augment,
    update_generator,
)
from splitstep.data.images import as_image, as_pixels
from splitstep.data.settings import validated
from splitstep.solver.errors import UserError

DEIT = Augmentation(crop="padded", hflip=0.5, aa="rand-m9-mstd0.5-inc1", reprob=0.25, mixup=0.8, cutmix=1.0)
JITTER = Augmentation(crop="resized", hflip=0.5, color_jitter=0.4)
AT_ANY_STRENGTH = {"autocontrast", "equalize", "invert", "posterize"}


def seen(image, settings, *key, size=32):
    mean = (120,) * len(image)
    return augmented(image, settings, image_generator(*key), size=size, mean=mean)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("settings", [DEIT, JITTER])
def test_an_image_is_a_function_of_seed_epoch_index_and_turn(settings, channels):
    image = images(1, shape=(channels, 32, 32))[0]
    first = [seen(image, settings, 1, epoch, index, turn) for epoch in (0, 1) for index in (0, 1) for turn in (0, 1)]
    again = [seen(image, settings, 1, epoch, index, turn) for epoch in (0, 1) for index in (0, 1) for turn in (0, 1)]
    np.testing.assert_array_equal(first, again)
    assert len({x.tobytes() for x in first}) == len(first)
    assert not np.array_equal(first[0], seen(image, settings, 2, 0, 0, 0))


@pytest.mark.parametrize("crop", CROPS)
@pytest.mark.parametrize("size", [24, 32, 48])
def test_every_crop_has_the_size_asked_for(crop, size):
    settings = Augmentation(crop=crop)
    for index in range(20):
        assert seen(images(1)[0], settings, 1, 0, index, 0, size=size).shape == (3, size, size)


def test_without_settings_nothing_is_done():
    image = images(1)[0]
    np.testing.assert_array_equal(seen(image, Augmentation(), 1, 2, 3, 4), image)


def test_a_padded_crop_is_a_shift_with_black_edges():
    image = images(1)[0]
    wide = np.pad(image, ((0, 0), (4, 4), (4, 4)))
    shifts = {wide[:, y : y + 32, x : x + 32].tobytes() for y in range(9) for x in range(9)}
    shown = {seen(image, Augmentation(crop="padded"), 1, 0, index, 0).tobytes() for index in range(1000)}
    assert shown <= shifts
    assert len(shown) == 81


@pytest.mark.parametrize("scale", [[0.08, 1.0], [0.5, 0.5], [1.0, 1.0]])
def test_a_resized_crop_of_one_colour_is_that_colour(scale):
    image = np.full((3, 20, 60), 77, np.uint8)
    assert (seen(image, Augmentation(crop="resized", scale=scale), 1, 0, 0, 0) == 77).all()


def test_half_of_the_images_are_flipped():
    image = images(1)[0]
    flipped = [np.array_equal(seen(image, Augmentation(hflip=0.5), 1, 0, i, 0), image[:, :, ::-1]) for i in range(400)]
    assert 0.4 < np.mean(flipped) < 0.6


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_keeps_size_and_mode_and_without_strength_the_image(name, channels):
    level, apply = OPERATIONS[name]
    image = as_image(images(1, shape=(channels, 32, 32))[0])
    fill = (1, 2, 3) if channels == 3 else 1
    for strength in (0.0, 0.5, 1.0):
        rng = np.random.default_rng(0)
        result = apply(image, level(strength, rng), fill)
        assert (result.size, result.mode) == (image.size, image.mode)
        if strength == 0 and name not in AT_ANY_STRENGTH:
            np.testing.assert_array_equal(as_pixels(result), as_pixels(image))


def test_the_operations_are_timms():
    assert len(OPERATIONS) == 15
    image, rng = as_image(np.full((3, 4, 4), 100, np.uint8)), np.random.default_rng(0)

    def at_nine(name):
        level, apply = OPERATIONS[name]
        return as_pixels(apply(image, level(0.9, rng), (9, 9, 9))).max()

    assert at_nine("invert") == 155
    assert at_nine("posterize") == 0  # one bit: below 128 is black
    assert at_nine("solarize") == 155  # from 26 on
    assert at_nine("solarize_add") == 199
    assert at_nine("brightness") in (19, 181)
    assert OPERATIONS["rotate"][0](0.9, rng) in (27, -27)
    assert abs(OPERATIONS["shear_x"][0](0.9, rng)) == pytest.approx(0.27)
    assert abs(OPERATIONS["translate_y"][0](0.9, rng)) == pytest.approx(0.405)


def test_policies_by_name():
    policy = rand_augment("rand-m9-mstd0.5-inc1")
    assert (policy.magnitude, policy.deviation, policy.operations) == (9, 0.5, 2)
    assert rand_augment("rand-m7-n3-inc1").operations == 3
    assert rand_augment("none") is None


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"aa": "rand-m9"}, "aa: aa is 'none' or one like 'rand-m9-mstd0.5-inc1'"),
        ({"aa": "rand-m9-inc1", "color_jitter": 0.4}, "color_jitter is the alternative to aa"),
        ({"hflip": 1.5}, "hflip: input should be less than or equal to 1"),
        ({"flip": 0.5}, "unknown key 'flip'"),
    ],
)
def test_wrong_settings_are_refused(values, complaint):
    with pytest.raises(UserError, match=complaint):
        validated(Augmentation, values)


def test_a_quarter_of_the_images_lose_a_box_to_noise():
    lost = []
    for index in range(600):
        image = np.zeros((3, 32, 32), np.float32)
        erase(image, 0.25, image_generator(1, 0, index, 0))
        changed = (image != 0).all(0)
        rows, columns = changed.any(1).sum(), changed.any(0).sum()
        assert changed.sum() == rows * columns
        lost.append(changed.mean())
    lost = np.array(lost)
    assert 0.19 < (lost > 0).mean() < 0.31
    assert lost[lost > 0].min() > 0.015
    assert lost.max() < 0.35


@pytest.mark.parametrize("settings", [DEIT, Augmentation(mixup=0.8), Augmentation(cutmix=1.0), Augmentation(mixup=1.0)])
def test_shares_of_labels_are_shares_of_pixels(settings):
    own, partners = np.zeros((4, 3, 32, 32), np.float32), np.ones((4, 3, 32, 32), np.float32)
    labels, others = np.arange(4), np.array([0, 3, 3, 3])
    kinds = set()
    for number in range(60):
        mixed = mixture(settings, update_generator(1, 0, number), size=32)
        kinds.add(mixed.box is not None)
        shares = mixed.labels(labels, others, 5)
        np.testing.assert_allclose(shares.sum(1), 1, rtol=1e-6)
        np.testing.assert_allclose(mixed.images(own, partners).mean((1, 2, 3)), shares[1, 3], atol=1e-6)
        assert shares[0, 0] == pytest.approx(1)
    assert kinds == {kind for kind, alpha in {False: settings.mixup, True: settings.cutmix}.items() if alpha}


def test_mixing_can_be_left_out_now_and_then():
    settings = Augmentation(mixup=1.0, mixup_prob=0.3)
    shares = [mixture(settings, update_generator(1, 0, number), size=8).share for number in range(300)]
    assert 0.6 < np.mean(np.equal(shares, 1)) < 0.8
