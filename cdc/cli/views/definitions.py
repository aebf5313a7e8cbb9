"""`view check` and `view explain`: what the definitions of views mean."""

from typing import TYPE_CHECKING, Annotated

import typer

from cdc.cli.output import DEFAULT_CONFIG, OUT, ConfigOption, JsonOption, complete_view, print_json, print_table

if TYPE_CHECKING:
    from cdc.service.views.check import CheckedView


def check(
    names: Annotated[
        list[str] | None, typer.Argument(help="Only these views.", metavar="NAME", autocompletion=complete_view)
    ] = None,
    config: ConfigOption = DEFAULT_CONFIG,
    as_json: JsonOption = False,
) -> None:
    """Check the definitions of views against the captured tables.

    Asks the source for its foreign keys, and for tables that are not in the log yet. Exit code 0 only if all are right.

    Example: millrace view check && millrace reload
    """
    found = _checked(config, names or [])
    if as_json:
        print_json([_facts(one) for one in found])
    else:
        print_table(("view", "kind", "verdict"), [(one.view.name, one.view.kind, _verdict(one)) for one in found])
        for one in found:
            if one.error is not None:
                OUT.print(f"! {one.error}", markup=False, soft_wrap=True)
    if any(one.error is not None for one in found):
        raise typer.Exit(1)


def explain(
    name: Annotated[str, typer.Argument(help="The view's name.", autocompletion=complete_view)],
    config: ConfigOption = DEFAULT_CONFIG,
    as_json: JsonOption = False,
) -> None:
    """Show what a view reads, what its rows are, and what its process reports of it.

    Example: millrace view explain totals
    """
    from cdc.service.daemon.process import settings_from
    from cdc.service.observe.health import nested
    from cdc.service.state import status
    from views.explanation import describe

    (found,) = _checked(config, [name])
    if found.error is not None:
        raise found.error
    lines = [] if found.plan is None else list(describe(found.plan))
    said = nested(status.read(settings_from(config).state, "views"), "views", found.view.name)
    if as_json:
        print_json({"view": found.view.name, "kind": found.view.kind, "lines": lines, "status": said})
        return
    for line in lines:
        OUT.print(line, markup=False, soft_wrap=True)
    facts = {key: value for key, value in said.items() if value not in ({}, None, "")}
    print_table(("", ""), [(key.replace("_", " "), value) for key, value in facts.items()])


def _checked(config: ConfigOption, names: list[str]) -> "list[CheckedView]":
    from cdc.service.daemon.process import settings_from
    from cdc.service.observe.positions import open_log
    from cdc.service.views.check import checked_views
    from cdc.service.views.view_run import view_named

    settings = settings_from(config)
    views = [view_named(settings, name) for name in names] or settings.views
    return checked_views(settings, views, open_log(settings))


def _verdict(one: "CheckedView") -> str:
    return "right" if one.error is None else "wrong"


def _facts(one: "CheckedView") -> dict[str, object]:
    message, remedy = ("", "") if one.error is None else (one.error.message, one.error.remedy)
    return {"view": one.view.name, "kind": one.view.kind, "right": not message, "message": message, "remedy": remedy}
