"""What the engine asks of a task."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from splitstep.data.batches import Piece
from splitstep.data.cache import notes_of
from splitstep.data.files import checksum
from splitstep.data.settings import Section

if TYPE_CHECKING:
    from splitstep.models.configuration import SplitstepConfig
    from splitstep.tasks.prediction import Predictor

Batch = dict[str, NDArray[Any]]
Item = TypeVar("Item")

# What a metric is better at: the higher or the lower.
METRICS = {
    "loss": min,
    "perplexity": min,
    "word_perplexity": min,
    "bits_per_byte": min,
    "bleu": max,
    "chrf": max,
    "accuracy": max,
    "top5": max,
    "f1": max,
    "matthews": max,
    "pearson": max,
    "spearman": max,
    "mlm_loss": min,
    "mlm_accuracy": max,
    "nsp_loss": min,
    "nsp_accuracy": max,
}


@dataclass(frozen=True)
class Measured:
    """What a model reached on a split, and what it did with each example: the ground of every significance test."""

    metrics: dict[str, Any]
    examples: list[dict[str, Any]] = field(default_factory=list)


class Task(ABC):
    """Data, model, loss and metrics of one kind of problem.

    A task is built from its settings and, to evaluate a trained model, from that model's folder, whose vocabulary or
    image processor it then uses. Where training begins with another model, `initial` is the folder of that one: its
    vocabulary is used, but the labels are those of the data.
    """

    Data: ClassVar[type[Section]]
    Evaluation: ClassVar[type[Section]]
    kind: ClassVar[str]  # of the model
    model_class: ClassVar[str]  # a public name of the package
    metric: str  # the one that a comparison looks at
    reported: tuple[str, ...]  # of METRICS, those that training can select by
    unit: ClassVar[str] = "tokens"  # what speed is counted in
    loss_options: ClassVar[Mapping[str, Any]] = {}  # further arguments of the model's forward, for its loss

    @classmethod
    def model(cls) -> type[Any]:
        """The class of the model that is trained."""
        import splitstep

        found: type[Any] = getattr(splitstep, cls.model_class)
        return found

    def __init__(
        self,
        data: Any,
        evaluation: Any,
        *,
        folder: Path | None = None,
        initial: Path | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.data, self.evaluation, self.say = data, evaluation, say
        self.folder, self.initial = folder, initial

    def _noted(self, folder: Path) -> Path:
        """A folder that was filled once, when what was noticed then has been said."""
        for note in notes_of(folder):
            self.say(note)
        return folder

    @property
    @abstractmethod
    def fingerprint(self) -> dict[str, str]:
        """The files the data came from, with their checksums."""

    @property
    def origin(self) -> dict[str, str]:
        """All files the task is made from: its data, and the vocabulary where that is a file."""
        vocabulary = getattr(self.data, "vocabulary", None)
        if vocabulary is None or vocabulary.file is None or self.initial is not None:
            return self.fingerprint
        path = Path(vocabulary.under(self.data.root).file)
        return self.fingerprint | {path.name: checksum(path)}

    @property
    def splits(self) -> list[str]:
        """The names of the splits there are: train, and of valid and test what the recipe names or holds out."""
        held_out = {"valid": getattr(self.data, "valid_every", None)}
        return ["train", *(split for split in ("valid", "test") if getattr(self.data, split) or held_out.get(split))]

    def files_of(self, split: str) -> str:
        """The split whose files a split is read from: what is held out lies among the training data."""
        return "train" if split == "valid" and getattr(self.data, "valid_every", None) else split

    def own(self, items: Iterable[Item], split: str) -> Iterator[Item]:
        """Of the examples of those files the split's own: all, or where some are held out each has its part."""
        every = getattr(self.data, "valid_every", None)
        if not every or split == "test":
            return iter(items)
        return (item for number, item in enumerate(items) if (number % every == 0) == (split == "valid"))

    @property
    def measured_split(self) -> str:
        """The split that a finished model is measured on where none is named: test, or valid where there is none."""
        return "test" if "test" in self.splits else "valid"

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What the data tell the model's configuration: vocabulary, special tokens, labels, sizes."""

    def check(self, config: "SplitstepConfig") -> None:  # noqa: B027 (most tasks have nothing to refuse)
        """Refuse what a finished model of this configuration could not be measured by."""

    @abstractmethod
    def save_processor(self, folder: Path) -> None:
        """Write what turns raw input into the model's, as transformers loads it."""

    @abstractmethod
    def lengths(self, split: str) -> NDArray[np.int64]:
        """The tokens of each example of a split."""

    def tilts(self, split: str) -> NDArray[np.int64] | None:
        """How many tokens longer the first side of each example is than the second, where it has two."""
        return None

    @abstractmethod
    def batch(self, split: str, indices: NDArray[np.int64], *, epoch: int | None = None, seed: int = 0) -> Batch:
        """The examples as the model takes them, and `num_items`, what their loss is a sum over.

        In training, `epoch` and `seed` decide what is drawn for each example; without an epoch nothing is drawn.
        """

    def training_batch(self, piece: Piece, *, seed: int) -> Batch:
        """The examples of a piece of an update, with what is drawn for them."""
        return self.batch("train", piece.indices, epoch=piece.epoch, seed=seed)

    def units(self, items: int) -> int:
        """How many of the task's units that many items of its loss are."""
        return items

    def flops_per_unit(self, config: "SplitstepConfig", *, sequences: int = 1) -> int:
        """Floating-point operations of a forward pass over so many examples, a unit."""
        from splitstep.models.accounting import flops_per_token

        length = max(round(float(self.lengths("train").mean())), 1)
        return flops_per_token(config, length=length, sequences=sequences)

    def from_loss(self, loss: float, split: str) -> dict[str, float]:
        """The metrics that follow from the loss an item."""
        return {"loss": loss}

    def validate(self, predictor: "Predictor", split: str, *, select: str = "loss") -> dict[str, Any]:
        """What is looked at during training: what follows from the loss, or all if what selects is not among it."""
        if select in self.from_loss(0.0, split):
            return self.from_loss(predictor.mean_loss(self, split), split)
        return self.measure(predictor, split).metrics

    @abstractmethod
    def measure(self, predictor: "Predictor", split: str) -> Measured:
        """What a finished model is judged by."""

    def answer(self, predictor: "Predictor") -> None:
        """What a user waits for, of the first validation example: here a forward pass."""
        batch = predictor.to_device(self.batch("valid", np.zeros(1, dtype=np.int64)))
        with predictor:
            predictor.model(**{name: tensor for name, tensor in batch.items() if not name.startswith("num_")})


def padded(sequences: list[NDArray[np.int32]], fill: int) -> NDArray[np.int64]:
    """The sequences as rows of one array, filled up on the right."""
    array = np.full((len(sequences), max(map(len, sequences))), fill, dtype=np.int64)
    for row, sequence in zip(array, sequences, strict=True):
        row[: len(sequence)] = sequence
    return array


def likeliest(logits: NDArray[np.float64]) -> list[tuple[int, float]]:
    """The number of the likeliest label of each row, and its probability."""
    shifted = np.exp(logits - logits.max(1, keepdims=True))
    return list(zip(logits.argmax(1).tolist(), (shifted.max(1) / shifted.sum(1)).tolist(), strict=True))
