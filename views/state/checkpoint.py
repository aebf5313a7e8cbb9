"""State in files: each run is an Arrow file, and a manifest names the runs and their position in the log.

Replacing the manifest is the commit. A crash before it leaves files that no manifest names; the next checkpoint removes
them. Runs are written once and mapped into memory, so a checkpoint costs what has changed since the one before.
"""

import json
import secrets
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
from pyarrow import ipc

from cdc.durable_files import make_folder, remove, replace, sync_folder, sync_written, write_errors
from cdc.errors import LogCorrupt
from views.state.runs import Run, run_schema
from views.state.table import StateTable

FORMAT = 1
"""Of files and hashes. State of another format is not read: the view computes it again."""
_MANIFEST = "manifest.json"


def save(folder: Path, tables: Mapping[str, StateTable], facts: Mapping[str, str]) -> None:
    """Make the tables durable together with `facts` (the position). The tables then read from the files."""
    make_folder(folder)
    with write_errors(folder / _MANIFEST):
        for table in tables.values():
            table.stored([run if run.name else _written(folder, run) for run in table.runs])
        sync_folder(folder)
        named = {name: [run.name for run in table.runs] for name, table in tables.items()}
        body = {"format": FORMAT, "facts": dict(facts), "tables": named}
        replace(folder / _MANIFEST, json.dumps(body, indent=1).encode())
    _remove_others(folder, {name for names in named.values() for name in names})


def facts_of(folder: Path) -> Mapping[str, str] | None:
    """The facts of the last checkpoint; None if there is none that can be used."""
    body = _manifest(folder)
    return None if body is None else body["facts"]


def load(folder: Path, tables: Mapping[str, StateTable]) -> None:
    """Give the tables the runs of the last checkpoint. Raises LogCorrupt if a file is missing or not readable."""
    body = _manifest(folder)
    named = {} if body is None else body["tables"]
    for name, table in tables.items():
        table.stored([_mapped(folder, run, run_schema(table.columns)) for run in named.get(name, ())])


def load_table(folder: Path, name: str, columns: pa.Schema) -> StateTable:
    """One table of the last checkpoint, also of another definition of the view; empty if there is none."""
    table = StateTable(columns)
    load(folder, {name: table})
    return table


def _manifest(folder: Path) -> dict[str, dict[str, str]] | None:
    try:
        body = json.loads((folder / _MANIFEST).read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        raise _corrupt(folder / _MANIFEST) from None
    return body if body["format"] == FORMAT else None


def _written(folder: Path, run: Run) -> Run:
    name = f"{secrets.token_hex(8)}.arrow"
    path = folder / name
    with ipc.new_file(str(path), run.rows.schema) as writer:
        writer.write_table(run.rows, max_chunksize=max(run.rows.num_rows, 1))
    path.chmod(0o600)
    sync_written(path)
    return _mapped(folder, name, run.rows.schema)


def _mapped(folder: Path, name: str, schema: pa.Schema) -> Run:
    try:
        with pa.memory_map(str(folder / name)) as file:
            rows = ipc.open_file(file).read_all()
    except (OSError, pa.ArrowException):
        raise _corrupt(folder / name) from None
    if rows.schema != schema:
        raise _corrupt(folder / name)
    return Run.of(rows.combine_chunks(), name)


def _corrupt(path: Path) -> LogCorrupt:
    return LogCorrupt(
        f"The state file {path} of a view is missing or not readable.",
        "Stop the pipeline and remove the folder `state` of the view: it is computed again from the log.",
    )


def _remove_others(folder: Path, named: set[str]) -> None:
    for path in folder.iterdir():
        if path.suffix == ".arrow" and path.name not in named:
            remove(path)  # a mapped file stays readable for those who have it
