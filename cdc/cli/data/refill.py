"""`refill`: have tables that a store lost made anew there, and their rows read again."""

from typing import Annotated

import typer

from cdc.cli.output import DEFAULT_CONFIG, OUT, ConfigOption, JsonOption, print_json
from cdc.errors import ConfigError


def refill(
    sink: Annotated[str, typer.Argument(help="The sink whose store lost something.")],
    tables: Annotated[list[str] | None, typer.Argument(help="Only these tables, as schema.name.")] = None,
    config: ConfigOption = DEFAULT_CONFIG,
    as_json: JsonOption = False,
) -> None:
    """Fill a store again that lost what it held.

    Each lost table is made anew in the store, empty, and read again beside the stream, whole. Other stores ignore the
    rows, since they hold them. Positions of the sink count again when all of them have arrived.

    Examples:

        millrace refill redis

        millrace refill search public.orders
    """
    from cdc.model import TableId
    from cdc.service.daemon.process import settings_from
    from cdc.service.daemon.reload import daemon_pid
    from cdc.service.state.store_files import StoreFiles

    settings = settings_from(config)
    if sink not in {one.name for one in settings.sinks}:
        raise ConfigError(f"No sink is called {sink}.", f"Sinks: {', '.join(one.name for one in settings.sinks)}.")
    kept = StoreFiles(settings.state, sink)
    lost = kept.losses()
    try:
        wanted = [TableId.parse(name) for name in tables or ()] or list(lost)
    except ValueError as error:
        raise ConfigError(f"{error}.") from None
    whole = [str(table) for table in wanted if table not in lost]
    if whole or not lost:
        said = f"Sink {sink} has not lost {', '.join(whole) or 'anything'}."
        others = ", ".join(map(str, lost)) or "nothing"
        raise ConfigError(said, f"Lost: {others}. To read rows again anyway: millrace backfill")
    if stuck := [table for table in wanted if not lost[table].refill]:
        raise ConfigError(f"{stuck[0]}: {lost[stuck[0]].message}.", lost[stuck[0]].remedy)
    kept.ask_refill(wanted)
    names = list(map(str, wanted))
    if as_json:
        print_json({"sink": sink, "tables": names})
        return
    OUT.print(f"{', '.join(names)} will be filled again in {sink}. See: millrace status", markup=False)
    if daemon_pid(settings.state) is None:
        OUT.print("The pipeline does not run now; it does so when it is started.")
