"""`fresh`: a Delta table with the newer changes of the log."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cdc.cli.output import DEFAULT_CONFIG, OUT, ConfigOption, JsonOption, print_json
from cdc.errors import ConfigError
from cdc.model import format_lsn

if TYPE_CHECKING:
    import pyarrow as pa

_FORMATS = (".parquet", ".csv")


def fresh(
    table: Annotated[str, typer.Argument(help="A table as schema.name.")],
    *,
    config: ConfigOption = DEFAULT_CONFIG,
    sink: Annotated[str, typer.Option(metavar="SINK", help="The Delta sink, if the pipeline has several.")] = "",
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the rows to this file: .parquet or .csv.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Read a Delta table together with the newer changes of the log.

    Does not wait for the sink to write these changes. Prints the number of rows, or writes the rows to a file.

    Example: millrace fresh public.orders --output orders.parquet
    """
    from cdc.service.inspect.fresh import fresh

    if output is not None and output.suffix not in _FORMATS:
        raise ConfigError(
            f"{output.name} has an unknown file format.", f"Use a name that ends with {' or '.join(_FORMATS)}."
        )
    found = fresh(config, table, sink)
    rows = found.arrow()
    if output is not None:
        _write(rows, output)
    facts = {"table": table, "rows": rows.num_rows, "changed": found.changed.num_rows, "lsn": format_lsn(found.reached)}
    if as_json:
        print_json(facts)
    else:
        OUT.print(
            f"{table} at {facts['lsn']}: {rows.num_rows:,} rows; {found.changed.num_rows:,} keys changed "
            "since the Delta table's version."
        )


def _write(rows: "pa.Table", output: Path) -> None:
    import pyarrow.csv
    import pyarrow.parquet

    if output.suffix == ".csv":
        pyarrow.csv.write_csv(rows, output)
    else:
        pyarrow.parquet.write_table(rows, output)
