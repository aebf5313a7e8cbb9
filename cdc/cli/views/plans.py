"""`view check` and `view explain`: what a view's definition means, before and while it runs."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from cdc.cli.output import DEFAULT_CONFIG, OUT, ConfigOption, JsonOption, complete_view, print_json, print_table

if TYPE_CHECKING:
    from cdc.config.settings import Settings, ViewSettings
    from views.plan import ViewPlan


def check(config: ConfigOption = DEFAULT_CONFIG, as_json: JsonOption = False) -> None:
    """Check every view against the captured tables, their columns and their types.

    Asks the log for the schemas, and the source for foreign keys and for tables that the log lacks. Exit code 2
    if a definition is wrong.

    Example: millrace view check
    """
    from cdc.errors import MillraceError
    from cdc.service.daemon.process import settings_from

    settings = settings_from(config)
    found: dict[str, str] = {}
    for view in settings.views:
        try:
            _plan(settings, view)
            found[view.name] = ""
        except MillraceError as error:
            found[view.name] = str(error)
    if as_json:
        print_json({"views": [{"name": name, "error": error} for name, error in found.items()]})
    else:
        print_table(("view", "verdict"), [(name, error or "right") for name, error in found.items()])
    if any(found.values()):
        raise typer.Exit(2)


def explain(
    name: Annotated[str, typer.Argument(help="The view's name.", autocompletion=complete_view)],
    config: ConfigOption = DEFAULT_CONFIG,
    as_json: JsonOption = False,
) -> None:
    """Show how a view is computed: what it reads, its steps and what each keeps, its key and columns.

    Example: millrace view explain order_documents
    """
    from cdc.service.daemon.process import settings_from
    from cdc.service.views.view_run import view_named

    settings = settings_from(config)
    facts = _facts(settings, view_named(settings, name))
    if as_json:
        print_json(facts)
        return
    for title, lines in facts.items():
        OUT.print(f"{title}:", style="bold")
        for line in lines if isinstance(lines, list) else [lines]:
            OUT.print(f"  {line}", markup=False)


def _plan(settings: "Settings", view: "ViewSettings") -> "ViewPlan":
    from cdc.service.observe.positions import open_log
    from cdc.service.views.catalog import whole_catalog
    from views.registry import plan_of

    return plan_of(view, whole_catalog(settings, open_log(settings)))


def _facts(settings: "Settings", view: "ViewSettings") -> dict[str, object]:
    from cdc.service.state import status

    plan = _plan(settings, view)
    said = status.read(settings.state, "views").get("views")
    state = said.get(view.name, {}) if isinstance(said, Mapping) else {}
    again = "from the tables (millrace verify)" if plan.referee is not None else "from the log: it depends on its order"
    return {
        "reads": [f"{table}: {', '.join(columns)}" for table, columns in plan.columns.items()],
        "steps": list(_steps(plan)),
        "key": ", ".join(column.name for column in plan.schema.key),
        "columns": [f"{column.name} {column.type.name}" for column in plan.schema.columns],
        "computed again": again,
        "definition": plan.definition,
        "state": [f"{name}: {value}" for name, value in state.items() if name != "error"],
    }


def _steps(plan: "ViewPlan") -> Iterator[str]:
    """Steps that say something, and what each keeps between batches."""
    for node in plan.graph().nodes:
        kept = f" [keeps {', '.join(node.state)}]" if node.state else ""
        if node.text or kept:
            yield f"{node.name}: {node.text}{kept}"
