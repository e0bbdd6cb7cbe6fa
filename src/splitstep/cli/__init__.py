"""The command `splitstep`. Data goes to stdout, everything else to stderr; wrong use is one line and exit code 2.

Torch and transformers take seconds to import, so each command imports what it needs.
"""

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from splitstep import __version__
from splitstep.cli import bench, compare, data, glue, inspect, run, use  # noqa: F401 (each adds its commands)
from splitstep.cli.app import app
from splitstep.solver.errors import RunError, UserError


def main() -> NoReturn:
    """Run the command and leave with its exit code."""
    try:
        code = app(standalone_mode=False)
    except UserError as error:
        _fail(str(error))
    except RunError as error:
        _fail(str(error), code=1)
    except typer.TyperException as error:
        # A usage error carries its message; without arguments the message is the help page.
        _fail(getattr(error, "format_message", error.__str__)())
    except BrokenPipeError:
        sys.stderr.close()
        code = 141
    except OSError as error:
        if isinstance(error, FileExistsError | NotADirectoryError) and (file := _file_among(error.filename)):
            _fail(f"{file} is a file, not a folder")
        named = f": {error.filename}" if error.filename else ""
        _fail(f"{error.strerror or error}{named}", code=1)
    if code == 130:
        typer.echo("splitstep: interrupted", err=True)
    sys.exit(code if isinstance(code, int) else 0)


def _file_among(path: str | None) -> Path | None:
    """The part of a path that is a file, where a folder was needed."""
    whole = Path(path or "")
    return next((part for part in (whole, *whole.parents) if part.is_file()), None)


def _fail(message: str, *, code: int = 2) -> NoReturn:
    typer.echo(f"splitstep: {message}", err=True)
    sys.exit(code)


@app.callback(invoke_without_command=True)
def options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    """Options that stand before a command."""
    if version:
        typer.echo(__version__)
        raise typer.Exit
