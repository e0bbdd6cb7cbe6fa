"""The model that training begins with: its weights, or its architecture alone, and always its vocabulary."""

import json
from pathlib import Path
from typing import Any

from splitstep.data.files import fingerprint
from splitstep.models.configuration import SplitstepConfig
from splitstep.models.presets import settings_for
from splitstep.recipe import Recipe
from splitstep.solver.errors import UserError
from splitstep.tasks import task_class

LABELS = ("id2label", "label2id", "problem_type", "num_labels")  # of the task that the model was trained on before


def initial_folder(recipe: Recipe) -> Path | None:
    """The model folder that `training.init` names: that of a finished run, or itself."""
    if recipe.training.init is None:
        return None
    named = Path(recipe.training.init).expanduser()
    folder = named / "model" if (named / "recipe.toml").is_file() else named
    if not (folder / "config.json").is_file():
        raise UserError(f"training.init: {named} is neither the folder of a finished run nor of a model")
    return folder


def initial_checksums(folder: Path | None) -> dict[str, str]:
    """The content of the folder, by which a run knows again what it began with."""
    if folder is None:
        return {}
    files = [*sorted(folder.glob("*.safetensors")), *(folder / name for name in ("config.json", "tokenizer.json"))]
    found = fingerprint((path for path in files if path.is_file()), under=folder)
    return {f"training.init/{name}": checksum for name, checksum in found.items()}


def initial_configuration(folder: Path, recipe: Recipe, told: dict[str, Any]) -> SplitstepConfig:
    """The configuration of the model with the labels of the data and the changes of the recipe."""
    known = known_configuration(folder)
    _check_vocabulary(folder, known, told)
    chosen = dict(recipe.model)
    kind = str(chosen.get("kind", known.kind))
    scheme = settings_for(str(chosen.pop("preset")), kind) if "preset" in chosen else {}
    saved = json.loads((folder / "config.json").read_text())
    kept = {key: value for key, value in saved.items() if key not in LABELS}
    added = {key: value for key, value in told.items() if key not in ("vocab_size", "max_position_embeddings")}
    config = SplitstepConfig(**kept | added | _positions(folder, known, told) | scheme | chosen)
    kinds = task_class(recipe.task).model().kinds
    if config.kind not in kinds:
        raise UserError(f"training.init: the task needs a model of kind {' or '.join(kinds)}, not {config.kind}")
    return config


def known_configuration(folder: Path) -> SplitstepConfig:
    """The configuration of a model folder as it is."""
    try:
        return SplitstepConfig.from_pretrained(folder)
    except OSError as error:
        raise UserError(f"{folder / 'config.json'} cannot be read: {str(error).splitlines()[0]}") from None


def _check_vocabulary(folder: Path, known: SplitstepConfig, told: dict[str, Any]) -> None:
    ids = {key: (getattr(known, key), value) for key, value in told.items() if key.endswith("_token_id")}
    wrong = [f"{key} {was} and {now}" for key, (was, now) in ids.items() if was is not None and was != now]
    if told.get("vocab_size", 0) > known.vocab_size:
        wrong.append(f"{known.vocab_size} and {told['vocab_size']} tokens")
    if wrong:
        raise UserError(
            f"training.init: the vocabulary in {folder} belongs to another model: "
            f"model and vocabulary have {', '.join(wrong)}"
        )


def _positions(folder: Path, known: SplitstepConfig, told: dict[str, Any]) -> dict[str, int]:
    """The longer of what the model had and what the data need, which learned positions cannot be."""
    has, needs = known.max_position_embeddings, told.get("max_position_embeddings", 0)
    if needs > has and known.position_embedding == "learned":
        raise UserError(
            f"training.init: the data have up to {needs} tokens, and the model in {folder} positions for {has}"
        )
    return {"max_position_embeddings": max(has, needs)}
