"""`millrace example`: pipelines with views on this machine, to follow step by step."""

from typing import Annotated

import typer

from cdc.cli.output import OUT, print_table


def example(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="The example; none: list them.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the servers and the pipeline running.")] = False,
) -> None:
    """Run an example of a view, step by step, then verify.

    Each begins anew, with its own database. Ends with an error where the store differs from the tables.

    Example: millrace example timelines
    """
    from cdc.artifacts.folders import home_folder
    from deploy.examples.example import examples, named
    from deploy.examples.run import run

    if name is None:
        print_table(("example", "what it shows"), [(one.name, one.title) for one in examples().values()])
    elif not run(home_folder(), OUT, named(name), keep):
        OUT.print("\nThe store differs from the tables.", style="bold red")
        raise typer.Exit(1)
