"""`resync`: begin again when what the slot missed cannot be read any more."""

from cdc.cli.output import DEFAULT_CONFIG, OUT, ConfigOption, JsonOption, print_json


def resync(config: ConfigOption = DEFAULT_CONFIG, as_json: JsonOption = False) -> None:
    """Have the next start take a new slot and a new snapshot.

    What the source no longer has is removed from the stores. For a slot that was lost, moved or made anew. The
    stores keep what they hold until the snapshot has brought the rest. Capture must not be running.

    Example: millrace resync && millrace run
    """
    from cdc.service.capture import resync as request
    from cdc.service.daemon.process import settings_from

    request.request(settings_from(config))
    if as_json:
        print_json({"resync": "wanted"})
    else:
        OUT.print("The next start takes a new snapshot: millrace run")
