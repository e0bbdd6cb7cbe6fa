"""Commands that look and do not train: list, params, order."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from splitstep.cli.app import app
from splitstep.cli.output import Json, columns, print_json, print_table, progress
from splitstep.models.presets import KINDS, PRESETS
from splitstep.solver.errors import UserError, lookup, unknown
from splitstep.solver.schemes import fixed_step_schemes
from splitstep.solver.splittings import SPLITTINGS
from splitstep.solver.tableaus import TABLEAUS
from splitstep.tables import packaged, read, setting, with_settings
from splitstep.tasks import TASKS, task_class

if TYPE_CHECKING:
    from splitstep.models.configuration import SplitstepConfig


@app.command("list")
def list_names(as_json: Json = False) -> None:
    """Names of presets, splittings, integrators, tasks and recipes.

    A preset is a published architecture; `splitstep params PRESET` counts it.

    A splitting reads in the order of application; terms joined by + act together. The order of a scheme is the lower of
    the splitting's and the integrator's.
    """
    splittings = [
        {"part": part, "name": name, "order": _finite(entry.order), "substeps": str(entry)}
        for part, entries in SPLITTINGS.items()
        for name, entry in entries.items()
    ]
    integrators = [
        {"name": name, "order": entry.order, "stages": entry.stages, "adaptive": entry.adaptive}
        for name, entry in TABLEAUS.items()
    ]
    presets = [{"name": name, "settings": _assignments(row)} for name, row in PRESETS.items()]
    recipes = [{"name": name, "task": str(read(name).get("task"))} for name in packaged()]
    if as_json:
        tables = {"presets": PRESETS, "kinds": KINDS, "splittings": splittings, "integrators": integrators}
        print_json({**tables, "tasks": list(TASKS), "recipes": recipes})
        return
    print_table("presets", presets)
    typer.echo()
    print_table("kinds of model", [{"name": name, "defaults": _assignments(row)} for name, row in KINDS.items()])
    typer.echo()
    print_table("splittings", [{**row, "substeps": _shortened(str(row["substeps"]))} for row in splittings])
    typer.echo()
    print_table("integrators", integrators)
    typer.echo()
    print_table("recipes", recipes)
    typer.echo(f"tasks  {', '.join(TASKS)}")


@app.command()
def params(
    name: Annotated[
        str, typer.Argument(metavar="RECIPE|PRESET", help="A recipe or a preset; `splitstep list` names them.")
    ],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE ...]", help="Settings of the configuration.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Parameters by part, which layers share weights, FLOPs and evaluations.

    KEY is `kind` (encoder, causal, seq2seq, image) or any setting of the configuration, by its Hugging Face name. Of a
    recipe, the settings of its [model] are taken, and KEY changes them; of a grid, the values that stand outside of it.
    Vocabulary, labels and sizes are those of the recipe's data where they are there, and can be given as KEY where not.
    FLOPs are those of a forward pass over a full sequence, a token; a multiplication with its addition counts as two.

    Example: splitstep params parallel kind=image hidden_size=192 num_attention_heads=3 intermediate_size=768
    num_hidden_layers=12 num_independent_layers=4 num_labels=100
    """
    chosen = dict(map(setting, settings or []))
    head = None
    if name in PRESETS:
        config = _configured({"preset": name, "kind": "encoder"} | chosen)
    elif name in packaged() or name.endswith(".toml"):
        tables = {key: value for key, value in read(name).items() if key != "grid"}
        config, head = _of_recipe(with_settings(tables, ((f"model.{key}", value) for key, value in chosen.items())))
    else:
        raise unknown("preset or recipe", name, [*PRESETS, *packaged()])

    from splitstep.models.accounting import account

    report = account(config, head)
    if as_json:
        print_json(report)
        return
    counts = [{"part": part, "parameters": f"{report[part]:,}"} for part in ("body", "embeddings", "head", "total")]
    print_table(f"{name}, {config.kind}", counts)
    typer.echo()
    for part, sharing in report["sharing"].items():
        typer.echo(f"weights of the {part}'s layers  {' '.join(map(str, sharing))}")
    evaluations = ", ".join(f"{term} {count}" for term, count in report["evaluations_per_layer"].items())
    typer.echo(f"evaluations a layer  {evaluations}")
    typer.echo(f"order of accuracy  {', '.join(f'{part} {order}' for part, order in report['order'].items())}")
    typer.echo(f"FLOPs a token  {report['flops_per_token']:,} at {report['sequence_length']} tokens")
    if report["cache_per_token"]:
        kept = ", ".join(f"{count:,} for each token {what}" for what, count in report["cache_per_token"].items())
        typer.echo(f"numbers kept in generation  {kept.replace('token source', 'token of the source')}")


def _configured(model: dict[str, Any]) -> "SplitstepConfig":
    kind, scheme = str(model.pop("kind")), str(model.pop("preset", "transformer"))
    lookup("preset", scheme, PRESETS)
    lookup("kind", kind, KINDS)

    from splitstep.models.presets import preset

    return preset(scheme, kind, **model)


def _of_recipe(tables: dict[str, Any]) -> tuple["SplitstepConfig", type[Any]]:
    """The configuration of a recipe's model, and the class of the model."""
    from splitstep.data.places import nothing_fetched
    from splitstep.recipe import recipe
    from splitstep.training.ready import configuration, task_of

    whole = recipe(tables)
    task = task_class(whole.task)
    assumed = _configured({"kind": task.kind} | whole.model)  # and a wrong setting is refused
    try:
        with nothing_fetched():
            return configuration(whole, task_of(whole)), task.model()
    except UserError as error:
        typer.echo(
            f"counted with {assumed.vocab_size:,} tokens, {assumed.num_labels} labels and the usual sizes, where the "
            f"recipe does not say more, for the data cannot be read: {error}",
            err=True,
        )
        return assumed, task.model()


def _assignments(row: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in row.items())


@app.command()
def order(
    as_json: Json = False,
    part: Annotated[str | None, typer.Option(help="Only this part: encoder or decoder.")] = None,
    splitting: Annotated[str | None, typer.Option(help="Only this splitting.")] = None,
    integrator: Annotated[str | None, typer.Option(help="Only this integrator.")] = None,
    reversible: Annotated[bool, typer.Option("--reversible", help="Of the schemes made reversible.")] = False,
) -> None:
    """Order of accuracy of every scheme, derived and measured.

    Derived: from the coefficients alone, in exact fractions. Measured: the slope of the error under halved steps, in
    float64, on the attention and feed-forward fields the models use. All schemes take less than a minute; the options
    choose some.

    Example: splitstep order --splitting strang --integrator euler
    """
    rows = _chosen_schemes(part, splitting, integrator)

    import torch

    from splitstep.fields.probe import measured_orders

    torch.set_num_threads(1)  # four particles: more took six times as long beside other work
    results = []
    widths = (8, 21, 11, 8, 9, 6)
    if not as_json:
        typer.echo(columns(("part", "splitting", "integrator", "derived", "measured", "steps"), widths))
    for number, result in enumerate(measured_orders(rows, reversible=reversible), start=1):
        *names, derived, measurement = result
        if as_json:
            progress(f"{number} of {len(rows)} schemes measured", last=number == len(rows))
        else:
            cells = (*names, derived, f"{measurement.order:.3f}", measurement.steps)
            typer.echo(f"{columns(cells, widths)}  {measurement.note}".rstrip())
        results.append(
            dict(zip(("part", "splitting", "integrator"), names, strict=True))
            | {"derived": derived, "measured": measurement.order, "settled": measurement.settled}
        )
    if as_json:
        print_json(results)


def _chosen_schemes(part: str | None, splitting: str | None, integrator: str | None) -> list[tuple[str, str, str]]:
    rows = fixed_step_schemes()
    if integrator in TABLEAUS and TABLEAUS[integrator].adaptive:
        raise UserError(
            f"{integrator} chooses its steps, so that there are none to halve; `splitstep list` has its order"
        )
    for index, (kind, name) in enumerate({"part": part, "splitting": splitting, "integrator": integrator}.items()):
        if name is not None:
            lookup(kind, name, {row[index]: row for row in rows})
            rows = [row for row in rows if row[index] == name]
    return rows


def _finite(order: float) -> int | None:
    return None if order == float("inf") else int(order)


def _shortened(sentence: str, width: int = 78) -> str:
    return sentence if len(sentence) <= width else f"{sentence[: width - 4].rpartition(',')[0]}, ..."
