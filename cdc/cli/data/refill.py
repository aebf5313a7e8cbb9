"""`refill`: recreate the tables that a store has lost, and read their rows again."""

from typing import Annotated

import typer

from cdc.cli.output import DEFAULT_CONFIG, OUT, ConfigOption, JsonOption, print_json
from cdc.errors import ConfigError


def refill(
    sink: Annotated[str, typer.Argument(help="The sink whose store has lost tables.")],
    tables: Annotated[list[str] | None, typer.Argument(help="Only these tables, as schema.name.")] = None,
    config: ConfigOption = DEFAULT_CONFIG,
    as_json: JsonOption = False,
) -> None:
    """Refill tables that a store has lost.

    Recreates each lost table in the store, empty, and requests a backfill of the whole table. Other stores ignore the
    rows, since they have them. The sink's position counts again once all rows have arrived.

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
    files = StoreFiles(settings.state, sink)
    lost = files.losses()
    try:
        wanted = [TableId.parse(name) for name in tables or ()] or list(lost)
    except ValueError as error:
        raise ConfigError(f"{error}.") from None
    whole = [str(table) for table in wanted if table not in lost]
    if whole or not lost:
        message = f"Sink {sink} has not lost {', '.join(whole) or 'anything'}."
        others = ", ".join(map(str, lost)) or "nothing"
        raise ConfigError(message, f"Lost: {others}. To read rows again anyway: millrace backfill")
    if stuck := [table for table in wanted if not lost[table].refill]:
        raise ConfigError(f"{stuck[0]}: {lost[stuck[0]].message}.", lost[stuck[0]].remedy)
    files.request_refill(wanted)
    names = list(map(str, wanted))
    if as_json:
        print_json({"sink": sink, "tables": names})
        return
    OUT.print(f"{', '.join(names)} will be refilled in {sink}. See: millrace status", markup=False)
    if daemon_pid(settings.state) is None:
        OUT.print("The pipeline does not run now; the refill begins when it starts.")
