"""`demo`: the whole thing on this machine, proved at the end."""

from typing import Annotated

import typer

from cdc.cli.output import OUT


def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Leave the servers and the pipeline running.")] = False,
    seconds: Annotated[float, typer.Option(metavar="SECONDS", help="How long customers come to the shop.")] = 20.0,
) -> None:
    """Start real servers and a shop; prove that all stores equal it.

    Example: millrace demo --seconds 60 --keep
    """
    from cdc.artifacts.folders import home_folder
    from deploy.demo.demo import run

    if not run(home_folder(), OUT, keep, seconds):
        OUT.print("The stores differ from the source.", style="bold red")
        raise typer.Exit(1)
    OUT.print("\nAll stores equal the source.", style="bold green")
