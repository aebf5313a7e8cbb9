"""`completion`: the script that lets a shell complete commands, options, sinks and tables."""

from typing import Annotated, Literal

import typer
from typer._completion_shared import get_completion_script

_PROGRAM, _VARIABLE = "millrace", "_MILLRACE_COMPLETE"

_ZSH_END = "compdef _millrace_completion millrace"
_ZSH_BOTH = f"""\
{_ZSH_END}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
  _millrace_completion "$@"
fi"""
"""zsh loads a file in `fpath` at the first Tab; that Tab needs a completion too."""

Shell = Literal["bash", "zsh", "fish"]


def completion(shell: Annotated[Shell, typer.Argument(help="The shell.")]) -> None:
    """Print the completion script for a shell.

    The script calls `millrace` for the completions, so it need not be updated.

    Examples:

        millrace completion bash >> ~/.bashrc

        millrace completion zsh > "${fpath[1]}/_millrace"

        millrace completion fish > ~/.config/fish/completions/millrace.fish
    """
    script = get_completion_script(prog_name=_PROGRAM, complete_var=_VARIABLE, shell=shell)
    typer.echo(script.replace(_ZSH_END, _ZSH_BOTH) if shell == "zsh" else script)
