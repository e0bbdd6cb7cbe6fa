"""One file a task: its data, its model, its loss and its metrics. Nothing here needs torch before a model runs."""

import importlib
from typing import TYPE_CHECKING

from splitstep.solver.errors import lookup

if TYPE_CHECKING:
    from splitstep.tasks.base import Task

# A new task is one file and one row.
TASKS = {
    "glue": "splitstep.tasks.glue:Glue",
    "images": "splitstep.tasks.images:Images",
    "language-modelling": "splitstep.tasks.language_modelling:LanguageModelling",
    "pre-training": "splitstep.tasks.pretraining:PreTraining",
    "text-classification": "splitstep.tasks.classification:Classification",
    "text-matching": "splitstep.tasks.matching:Matching",
    "translation": "splitstep.tasks.translation:Translation",
}


def task_class(name: str) -> "type[Task]":
    """The task of that name."""
    module, _, attribute = lookup("task", name, TASKS).partition(":")
    return getattr(importlib.import_module(module), attribute)
