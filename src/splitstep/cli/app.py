"""The application that every command joins."""

import typer

app = typer.Typer(
    name="splitstep",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Transformers as numerical ODE solvers: tokens are particles, depth is time.

    Every architecture is a row of data: how the right-hand side is split, which integrator advances it, which weights
    act when, and how attention evolves. Start with `splitstep list` for the names and `splitstep order` for what each
    scheme is worth numerically.""",
)
