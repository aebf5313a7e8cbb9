"""`millrace demo`: servers, pipeline and workload on this machine, and a comparison at the end."""

from typing import Annotated

import typer

from cdc.cli.output import OUT


def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Leave the servers and the pipeline running.")] = False,
    seconds: Annotated[float, typer.Option(metavar="SECONDS", help="How long the workload runs.")] = 20.0,
) -> None:
    """Run servers, a pipeline and a workload, then verify.

    Ends with an error where a sink differs from the source.

    Example: millrace demo --seconds 60 --keep
    """
    from cdc.artifacts.folders import home_folder
    from deploy.demo.demo import run

    if not run(home_folder(), OUT, keep, seconds):
        OUT.print("The sinks differ from the source.", style="bold red")
        raise typer.Exit(1)
    OUT.print("\nAll sinks equal the source.", style="bold green")
