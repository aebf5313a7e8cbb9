"""`doctor`: check the source, the log's server, and the Spark cluster if there is one."""

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from cdc.cli.output import DEFAULT_CONFIG, OUT, ConfigOption, JsonOption, print_json, print_table

if TYPE_CHECKING:
    from cdc.capture.source.doctor import Finding
    from cdc.config.settings import Settings


def doctor(config: ConfigOption = DEFAULT_CONFIG, as_json: JsonOption = False) -> None:
    """Check the source, the log's server, and the Spark cluster if there is one; show what to run if one is not ready.

    Checks settings, privileges, replica identities, publication and slot; that the shapes of sinks fit their tables;
    that Kafka or the log's bucket answers; on a cluster also authentication and what executors see. Changes nothing.
    Exit code 0 if no check fails; warnings do not count.

    Example: millrace doctor --json
    """
    from cdc.capture.source.doctor import Verdict, examine
    from cdc.service.daemon.process import settings_from

    settings = settings_from(config)
    findings = [*examine(settings.source), *_of_shapes(settings), *_of_log(settings), *_of_cluster(settings)]
    failed = [finding for finding in findings if finding.verdict is Verdict.FAIL]
    if as_json:
        print_json({"ok": not failed, "findings": [asdict(finding) for finding in findings]})
    else:
        rows = [(finding.verdict, finding.check, finding.object, finding.message) for finding in findings]
        print_table(("", "check", "object", "finding"), rows)
        for finding in findings:
            if finding.remedy:
                OUT.print(f"{finding.verdict}: {finding.object}: {finding.remedy}", markup=False, soft_wrap=True)
    if failed:
        sys.exit(1)


def _of_shapes(settings: "Settings") -> "list[Finding]":
    """Shapes against the source's catalog. A table that cannot be read is a finding of the source already."""
    shaped = {table for sink in settings.sinks for table in sink.shape}
    if not shaped:
        return []
    from cdc.capture.source.connect import connect
    from cdc.errors import MillraceError
    from sinks.shape.check import examine
    from snapshots.tables.rows import describe, masking_of

    schemas = []
    try:
        with connect(settings.source, "millrace doctor") as connection:
            for table in (table for table in settings.source.tables if table.name in shaped):
                schemas.append(describe(connection, table, masking_of(settings.source)).layout.schema)
    except MillraceError:
        return examine(settings, schemas)
    return examine(settings, schemas)


def _of_log(settings: "Settings") -> "list[Finding]":
    """Nothing for a log in a folder."""
    import cdc.log
    from cdc.capture.source.doctor import Finding, Verdict
    from cdc.errors import MillraceError
    from cdc.service.daemon.process import LOG_SECONDS

    server = str(getattr(settings.log, "uri", "") or getattr(settings.log, "bootstrap", ""))
    if not server:
        return []
    try:
        cdc.log.check_server(settings, LOG_SECONDS)
    except MillraceError as error:
        return [Finding("log", Verdict.FAIL, server, error.message, error.remedy)]
    return [Finding("log", Verdict.OK, server, "answers")]


def _of_cluster(settings: "Settings") -> "list[Finding]":
    """Imports Spark, which costs a second, only where there is a cluster."""
    if settings.spark.master.startswith("local"):
        return []
    from sinks.spark.doctor import examine

    return examine(settings)
