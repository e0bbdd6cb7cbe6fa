"""Transformers as numerical solvers of an ordinary differential equation.

The names below load what they need when they are first used, so that `import splitstep` is quick. The models are
registered with transformers' Auto classes as soon as those are there.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "SplitstepConfig": "splitstep.models.configuration",
    "SplitstepModel": "splitstep.models.backbone",
    "SplitstepForMaskedLM": "splitstep.models.heads",
    "SplitstepForPreTraining": "splitstep.models.heads",
    "SplitstepForSequenceClassification": "splitstep.models.heads",
    "SplitstepForSequencePairClassification": "splitstep.models.heads",
    "SplitstepForCausalLM": "splitstep.models.heads",
    "SplitstepForConditionalGeneration": "splitstep.models.heads",
    "SplitstepForImageClassification": "splitstep.models.heads",
    "load_published": "splitstep.models.published",
    "preset": "splitstep.models.presets",
}
__all__ = [*_HOMES, "__version__"]

if TYPE_CHECKING:
    from splitstep.models.backbone import SplitstepModel as SplitstepModel
    from splitstep.models.configuration import SplitstepConfig as SplitstepConfig
    from splitstep.models.heads import SplitstepForCausalLM as SplitstepForCausalLM
    from splitstep.models.heads import SplitstepForConditionalGeneration as SplitstepForConditionalGeneration
    from splitstep.models.heads import SplitstepForImageClassification as SplitstepForImageClassification
    from splitstep.models.heads import SplitstepForMaskedLM as SplitstepForMaskedLM
    from splitstep.models.heads import SplitstepForPreTraining as SplitstepForPreTraining
    from splitstep.models.heads import SplitstepForSequenceClassification as SplitstepForSequenceClassification
    from splitstep.models.heads import SplitstepForSequencePairClassification as SplitstepForSequencePairClassification
    from splitstep.models.presets import preset as preset
    from splitstep.models.published import load_published as load_published


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'splitstep' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# What to do once a module of transformers is there. Importing it here would cost every `splitstep --help` some seconds.
_AFTER_IMPORT = {
    "transformers.models.auto.configuration_auto": "register_configuration",
    "transformers.models.auto.modeling_auto": "register_models",
    "transformers.models.auto.image_processing_auto": "register_image_processor",
}


def _register(function: str) -> None:
    getattr(importlib.import_module("splitstep.models.registration"), function)()


class _AfterImport(importlib.abc.MetaPathFinder):
    """Registers our models right after transformers' tables of Auto classes are imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _AFTER_IMPORT:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _register(_AFTER_IMPORT[fullname])

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


for _module, _function in _AFTER_IMPORT.items():
    if _module in sys.modules:
        _register(_function)
sys.meta_path.insert(0, _AfterImport())
