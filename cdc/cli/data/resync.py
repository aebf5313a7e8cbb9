"""`resync`: start over with a new slot and a new snapshot when the old slot cannot be used."""

from cdc.cli.output import DEFAULT_CONFIG, OUT, ConfigOption, JsonOption, print_json


def resync(config: ConfigOption = DEFAULT_CONFIG, as_json: JsonOption = False) -> None:
    """Take a new slot and a new snapshot at the next start.

    For a slot that was lost, moved or recreated. Stores keep their rows until the snapshot is complete; then rows that
    the source no longer has are removed. Stop the pipeline first.

    Example: millrace resync && millrace run
    """
    from cdc.service.capture import resync as request
    from cdc.service.daemon.process import settings_from

    request.request(settings_from(config))
    if as_json:
        print_json({"resync": "wanted"})
    else:
        OUT.print("The next start takes a new snapshot: millrace run")
