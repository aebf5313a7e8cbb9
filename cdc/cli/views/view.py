"""`view`: the views of the pipeline: list them, have one emit its rows again, drop one."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from cdc.cli.output import DEFAULT_CONFIG, OUT, ConfigOption, JsonOption, complete_view, print_json, print_table
from cdc.cli.views import foreground, plans
from cdc.errors import ConfigError, MillraceError

if TYPE_CHECKING:
    from cdc.config.settings import Settings

app = typer.Typer(help="Show, check and run views (tables derived from captured tables).", no_args_is_help=True)
app.command("run")(foreground.run)
app.command("check")(plans.check)
app.command("explain")(plans.explain)

_ANSWER_SECONDS = 30.0
NameArgument = Annotated[str, typer.Argument(help="The view's name.", autocompletion=complete_view)]


@app.command("list")
def list_views(config: ConfigOption = DEFAULT_CONFIG, as_json: JsonOption = False) -> None:
    """List the views: kind, state, position, rows, lag and size of the state.

    A view's position is the LSN that its rows in the log reflect.

    Example: millrace view list
    """
    from cdc.service.daemon.process import settings_from

    settings = settings_from(config)
    found = _facts(settings)
    if as_json:
        print_json(found)
        return
    headings = ("view", "kind", "state", "reflects", "rows", "seconds behind", "state bytes")
    columns = ("view", "kind", "state", "lsn", "rows", "lag_seconds", "state_bytes")
    print_table(headings, [[_cell(facts[name]) for name in columns] for facts in found])
    for facts in found:
        if isinstance(error := facts["error"], Mapping) and error:
            OUT.print(f"! {facts['view']}: {error['message']} {error['remedy']}".rstrip(), markup=False, soft_wrap=True)


def _facts(settings: "Settings") -> list[dict[str, object]]:
    from cdc.cli.operate.tables import lags_now
    from cdc.service.observe.health import nested
    from cdc.service.state import status
    from views.dropped import is_dropped

    said, capture = (status.read(settings.state, part) for part in ("views", "capture"))
    lags = lags_now(settings)[0].views if capture else {}
    found = []
    for view in settings.views:
        facts, lag = nested(said, "views", view.name), lags.get(view.name)
        state = "dropped" if is_dropped(settings.state, view.name) else facts.get("state", "not running")
        found.append(
            {
                "view": view.name,
                "table": str(view.table),
                "kind": view.kind,
                "state": "not running" if status.gone(said) and state != "dropped" else state,
                "lsn": facts.get("lsn"),
                "rows": facts.get("rows"),
                "lag_seconds": None if lag is None else round(lag.seconds, 1),
                "lag_bytes": None if lag is None else lag.bytes,
                "state_bytes": facts.get("state_bytes"),
                "error": facts.get("error") or {},
            }
        )
    return found


def _cell(value: object) -> object:
    if isinstance(value, (int, float)):
        return f"{value:,}"
    return "-" if value is None else value


@app.command()
def emit(name: NameArgument, config: ConfigOption = DEFAULT_CONFIG, as_json: JsonOption = False) -> None:
    """Have a view emit all its rows again, for every sink.

    Stores that have them ignore them: each row keeps its version. A lost table is filled by `millrace refill` instead.

    Example: millrace view emit totals
    """
    from cdc.service.daemon.process import settings_from
    from cdc.service.daemon.reload import daemon_pid
    from cdc.service.views.view_run import view_named
    from views.output_files import OutputFolder

    settings = settings_from(config)
    view = view_named(settings, name)
    OutputFolder(settings.state, view.name).ask_to_emit_again()
    if as_json:
        print_json({"view": view.name, "asked": True})
        return
    OUT.print(f"{view.name} will emit all its rows again. See: millrace view list", markup=False)
    if daemon_pid(settings.state) is None:
        OUT.print("The pipeline does not run now; this takes effect when it starts.")


@app.command()
def drop(
    name: NameArgument,
    config: ConfigOption = DEFAULT_CONFIG,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Drop a view: remove its rows from the stores, and its state.

    A view that is only removed from the pipeline file leaves its rows in the stores. Drop it first, then remove it: all
    sinks then remove its rows. Of a view that is not in the file any more, only sinks without a list of tables do. A
    dropped view that stays in the file begins again with: millrace resume view.NAME

    Example: millrace view drop totals
    """
    from cdc.service.daemon.process import settings_from
    from cdc.service.daemon.reload import daemon_pid
    from views import dropped

    settings = settings_from(config)
    _require_known(settings, name)
    if not yes:
        typer.confirm(f"Remove all rows of view {name} from the stores?", abort=True, err=as_json)
    dropped.drop(settings.state, name)
    running = daemon_pid(settings.state) is not None
    if running:
        _wait_until_dropped(settings, name)
    if not any(view.name == name for view in settings.views):
        _remove_rest(settings, name)
    if as_json:
        print_json({"view": name, "dropped": running})
        return
    OUT.print(f"{name} is dropped: its rows leave the stores." if running else f"{name} will be dropped.", markup=False)
    if not running:
        OUT.print("The pipeline does not run now; this takes effect when it starts.")


def _require_known(settings: "Settings", name: str) -> None:
    """A view of the file, or one that has left something in the state folder."""
    known = {view.name for view in settings.views}
    known |= {path.name for path in (settings.state / "views").glob("*") if path.is_dir()}
    if name not in known:
        raise ConfigError(f"There is no view {name}.", f"Views: {', '.join(sorted(known)) or 'none'}.")


def _wait_until_dropped(settings: "Settings", name: str) -> None:
    from views import dropped

    deadline = time.monotonic() + _ANSWER_SECONDS
    while not dropped.is_done(settings.state, name):
        if time.monotonic() > deadline:
            raise MillraceError(
                f"View {name} is not dropped after {_ANSWER_SECONDS:g} s.",
                "It will be as soon as capture can append to the log. See: millrace status",
            )
        time.sleep(0.05)


def _remove_rest(settings: "Settings", name: str) -> None:
    """Of a view that is not in the file: no process runs it, so its state and position are removed here."""
    from cdc.service.observe.positions import open_log
    from cdc.service.views.view_run import consumer_of
    from views import dropped

    open_log(settings).forget(consumer_of(name))
    dropped.remove_state(settings.state, name)
