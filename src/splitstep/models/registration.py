"""Tell transformers' Auto classes which of our models is which."""


def register_configuration() -> None:
    """A folder whose model_type is "splitstep" has a SplitstepConfig."""
    from transformers.models.auto.configuration_auto import AutoConfig

    from splitstep.models.configuration import SplitstepConfig

    AutoConfig.register(SplitstepConfig.model_type, SplitstepConfig, exist_ok=True)


def register_models() -> None:
    """A SplitstepConfig has one model for each Auto class."""
    from transformers.models.auto import modeling_auto as auto

    from splitstep.models import backbone, heads
    from splitstep.models.configuration import SplitstepConfig

    for auto_class, model_class in {
        auto.AutoModel: backbone.SplitstepModel,
        auto.AutoModelForMaskedLM: heads.SplitstepForMaskedLM,
        auto.AutoModelForPreTraining: heads.SplitstepForPreTraining,
        auto.AutoModelForSequenceClassification: heads.SplitstepForSequenceClassification,
        auto.AutoModelForCausalLM: heads.SplitstepForCausalLM,
        auto.AutoModelForSeq2SeqLM: heads.SplitstepForConditionalGeneration,
        auto.AutoModelForImageClassification: heads.SplitstepForImageClassification,
    }.items():
        auto_class.register(SplitstepConfig, model_class, exist_ok=True)


def register_image_processor() -> None:
    """A folder whose image processor is ours loads it, with torchvision or without."""
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    from splitstep.models.configuration import SplitstepConfig
    from splitstep.models.processing import SplitstepImageProcessor

    classes: dict[str, type] = dict.fromkeys(("torchvision", "pil"), SplitstepImageProcessor)
    AutoImageProcessor.register(SplitstepConfig, image_processor_classes=classes, exist_ok=True)
