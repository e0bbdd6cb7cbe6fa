"""Matching of two texts: one encoder reads each of them by itself, a small network compares (document retrieval)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from splitstep.solver.errors import UserError
from splitstep.tasks.base import Batch
from splitstep.tasks.classification import Classification, Sequences, Texts


class Matching(Classification):
    """The label of a pair of texts that do not see each other."""

    model_class = "SplitstepForSequencePairClassification"

    def __init__(self, data: Any, evaluation: Any, **options: Any) -> None:
        super().__init__(data, evaluation, **options)
        if len(data.choice.texts) != 2:
            raise UserError(f"data.texts: matching takes two texts, got {len(data.choice.texts)}")

    def inputs_of(self, texts: Texts) -> list[Any]:
        """A sequence for each text."""
        return list(texts)

    def model_inputs(self, chosen: Sequences, indices: NDArray[np.int64]) -> Batch:
        """The first texts, and the second ones as `pair_...`."""
        first, second = (self.padded_rows(chosen, 2 * indices + side) for side in (0, 1))
        return first | {f"pair_{name}": array for name, array in second.items()}
