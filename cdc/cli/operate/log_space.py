"""`log compact` and `log trim`: shrink a segment log while the pipeline is stopped (a log has one writer)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from cdc.cli.output import DEFAULT_CONFIG, OUT, ConfigOption, JsonOption, print_json
from cdc.config.settings import Settings
from cdc.errors import ConfigError

if TYPE_CHECKING:
    from cdc.log.segments.log import SegmentWriter

DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")]
Force = Annotated[
    bool, typer.Option("--force", help="Also entries that registered consumers have not read; these must be refilled.")
]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]


@contextmanager
def _opened(config: ConfigOption) -> "Iterator[tuple[Settings, SegmentWriter]]":
    import cdc.log
    from cdc.log.segments.log import SegmentWriter
    from cdc.service.daemon.process import settings_from

    settings = settings_from(config)
    if settings.log.kind != "segments":
        raise ConfigError(
            f"A log of kind {settings.log.kind} has no segments.",
            "Kafka does this itself: see log.compact and the topics' settings.",
        )
    writer = cdc.log.open_writer(settings)
    assert isinstance(writer, SegmentWriter)
    try:
        yield settings, writer
    finally:
        writer.close()


def compact(
    config: ConfigOption = DEFAULT_CONFIG,
    force: Force = False,
    dry_run: DryRun = False,
    as_json: JsonOption = False,
) -> None:
    """Keep only the newest complete change of each row, and what follows it.

    A replay still ends with the same rows; the history before that change is gone. Stop the pipeline first.

    Example: millrace log compact --dry-run
    """
    with _opened(config) as (_, log):
        before = log.size
        rows = log.compactable(force) if dry_run else log.compact(force, whole=True)
        freed = 0 if dry_run else max(before - log.size, 0)
    if as_json:
        print_json({"rows": rows, "bytes": before, "freed_bytes": freed, "dry_run": dry_run})
        return
    text = (
        f"Would remove {rows} replaced change(s)." if dry_run else f"Removed {rows} replaced change(s), {freed} bytes."
    )
    OUT.print(text, markup=False)


def trim(  # noqa: PLR0917 - the options of a command
    config: ConfigOption = DEFAULT_CONFIG,
    hours: Annotated[
        float | None, typer.Option("--hours", min=0, help="Hours to keep, instead of log.retention_hours.")
    ] = None,
    gigabytes: Annotated[
        float | None, typer.Option("--gb", min=0, help="Gigabytes to keep, instead of log.retention_gb.")
    ] = None,
    force: Force = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: JsonOption = False,
) -> None:
    """Remove the oldest log entries now, by age and size.

    Positions stay. Stop the pipeline first.

    Example: millrace log trim --hours 24 --dry-run
    """
    with _opened(config) as (settings, log):
        kept_hours = settings.log.retention_hours if hours is None else hours
        kept_gigabytes = settings.log.retention_gb if gigabytes is None else gigabytes
        going = log.trimmable(kept_hours, kept_gigabytes, force)
        found = {
            "entries": sum(segment.stop - segment.start + 1 for segment in going),
            "rows": sum(segment.rows for segment in going),
            "until": str(going[-1].stop) if going else None,
            "dry_run": dry_run,
        }
        if going and not dry_run:
            if not yes:
                typer.confirm(f"Remove {found['entries']} of the oldest entries?", abort=True)
            log.trim(kept_hours, kept_gigabytes, force)
    if as_json:
        print_json(found)
    else:
        verb = "Would remove" if dry_run else "Removed"
        OUT.print(f"{verb} {found['entries']} entries with {found['rows']} change(s).", markup=False)
