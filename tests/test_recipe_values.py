"""Whatever stands in a recipe: it is refused in one line that names its key, or it is taken as it is."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from tests import corpora, image_files

from splitstep.models.accounting import empty_model
from splitstep.models.configuration import SplitstepConfig
from splitstep.models.presets import preset
from splitstep.recipe import recipe, schema
from splitstep.solver.errors import UserError
from splitstep.tables import with_setting
from splitstep.tasks import TASKS

BASES = {
    "translation": corpora.translation_recipe,
    "language-modelling": corpora.language_recipe,
    "pre-training": corpora.pretraining_recipe,
    "text-classification": corpora.classification_recipe,
    "text-matching": corpora.matching_recipe,
    "glue": corpora.glue_recipe,
    "images": image_files.images_recipe,
}

scalars = st.one_of(
    st.booleans(),
    st.integers(-3, 10**9),
    st.floats(allow_nan=True, allow_infinity=True, width=32),
    st.text(max_size=8),
    st.sampled_from(["auto", "all", "none", "mean", "train", "fsdp", "cosine", "byte", "best", "-1", "1e-3"]),
)
values = st.one_of(scalars, st.lists(scalars, max_size=3), st.dictionaries(st.text(max_size=4), scalars, max_size=2))


def leaves(section: Any, path: str) -> list[str]:
    """The keys of a section and of those in it."""
    found = []
    for name, field in section.model_fields.items():
        inner = [kind for kind in (field.annotation, *get_args(field.annotation)) if _is_section(kind)]
        found += leaves(inner[0], f"{path}{name}.") if inner else [f"{path}{name}"]
    return found


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _at(tables: dict, path: str) -> Any:
    for name in path.split("."):
        tables = tables[name]
    return tables


@pytest.mark.parametrize("task", TASKS)
@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_value_is_refused_with_its_key_or_kept(task, data):
    keys = [key for key in leaves(schema(task), "") if key.partition(".")[0] in ("data", "training", "evaluation")]
    key = data.draw(st.sampled_from(keys))
    value = data.draw(values)
    found, complaint = _attempt(lambda: recipe(with_setting(BASES[task]("/nowhere"), key, value)))
    if found is None:
        assert key in complaint
        assert "\n" not in complaint
    else:
        kept = _at(found.settings(), key)
        assert kept == value or (isinstance(value, float) and math.isnan(value))


def _attempt(make: Callable[[], Any]) -> tuple[Any, str]:
    """What is made, or what a user is told; any other error is one of ours."""
    try:
        return make(), ""
    except UserError as error:
        return None, str(error)


SIZES = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "num_hidden_layers": 2}
TEXT = {"vocab_size": 20, "max_position_embeddings": 16}
SMALL = dict.fromkeys(("encoder", "causal", "seq2seq"), SIZES | TEXT) | {"image": SIZES}


@pytest.mark.parametrize("kind", ["encoder", "causal", "seq2seq", "image"])
@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_model_is_refused_with_its_key_or_made(kind, data):
    known = [
        field.name for field in dataclasses.fields(SplitstepConfig) if field.name[0] != "_" and field.name != "kind"
    ]
    key = data.draw(st.sampled_from(known))
    value = data.draw(values)
    config, complaint = _attempt(lambda: preset("transformer", kind, **SMALL[kind] | {key: value}))
    if config is None:
        assert key.replace("_", " ") in complaint.replace("_", " ")
        assert "\n" not in complaint
    elif all(not isinstance(size, int) or size < 10**6 for size in vars(config).values()):
        empty_model(config)
