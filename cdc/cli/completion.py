"""`completion`: the script that makes a shell complete commands, options, sinks and tables."""

import os
from typing import Annotated, Literal

import typer

_PROGRAM, _VARIABLE = "millrace", "_MILLRACE_COMPLETE"

Shell = Literal["bash", "zsh", "fish"]


def completion(
    context: typer.Context, shell: Annotated[Shell, typer.Argument(help="The shell to write it for.")]
) -> None:
    """Print the completion script of a shell; it asks `millrace` itself, so it never grows old.

    Examples:

        millrace completion bash >> ~/.bashrc

        millrace completion zsh > "${fpath[1]}/_millrace"

        millrace completion fish > ~/.config/fish/completions/millrace.fish
    """
    os.environ[_VARIABLE] = f"source_{shell}"
    context.find_root().command.main([], prog_name=_PROGRAM)
