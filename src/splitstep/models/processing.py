"""From an image of any size to what an image model takes, as transformers loads it beside the model."""

from typing import Any

from numpy.typing import NDArray
from PIL.Image import Image as Picture
from PIL.Image import Resampling
from transformers.image_processing_backends import PilBackend
from transformers.processing_utils import ImagesKwargs


class _Options(ImagesKwargs, total=False):
    num_channels: int


class SplitstepImageProcessor(PilBackend):
    """The shorter side brought to `size`, the middle of `crop_size` cut out, scaled to [0, 1] and normalised.

    Pillow resizes whether or not torchvision is there, so that a prediction does not depend on what is installed.
    Images become grey where `num_channels` is 1, and RGB otherwise.
    """

    valid_kwargs = _Options
    resample = Resampling.BICUBIC
    do_resize = do_center_crop = do_rescale = do_normalize = True
    num_channels = 3

    def process_image(self, image: Any, *args: Any, **kwargs: Any) -> NDArray[Any]:
        """An image of any kind, channels first."""
        if isinstance(image, Picture):
            image = image.convert("L" if self.num_channels == 1 else "RGB")
        return super().process_image(image, *args, **kwargs)


def image_processor(
    *, image_size: int, resize: int, num_channels: int, mean: list[float], std: list[float]
) -> SplitstepImageProcessor:
    """The processor of images of `image_size`, cut out of the middle of a shorter side of `resize`."""
    return SplitstepImageProcessor(  # type: ignore[call-arg]
        size={"shortest_edge": resize},
        crop_size={"height": image_size, "width": image_size},
        num_channels=num_channels,
        image_mean=mean,
        image_std=std,
    )
