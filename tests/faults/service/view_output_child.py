"""A capture process without its source, made to be killed: appends what a view hands over to a bench's log, and entries
of its own beside it.

Argument: the bench's data as JSON.
"""

import json
import sys
import threading
import time
from itertools import count

import cdc.log
from cdc.service.capture.view_output import ViewOutput
from tests.contract.logs import entry, settings_of


def main() -> None:
    settings = settings_of(json.loads(sys.argv[1]))
    writer = cdc.log.open_writer(settings)
    with ViewOutput(writer, writer.schemas, settings.state, threading.Event()):
        for number in count(writer.progress().end // 100 + 1):
            writer.append(entry(number, size=1))
            time.sleep(0.02)


if __name__ == "__main__":
    main()
