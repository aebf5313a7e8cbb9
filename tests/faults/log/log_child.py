"""A segment writer in a process of its own, made to be stopped or killed.

Arguments: the log folder, or the lock's folder, URI and options of a log in a bucket as JSON; and what to do: `append`
waits for a line on a named pipe before its second entry, `maintain` merges what is there.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

from cdc.errors import LogFenced
from cdc.log.segments.log import SegmentSettings, SegmentWriter
from tests.contract.logs import entry
from tests.scenes.segment_logs import bucket_writer, folder_writer, location


def opened(place: str) -> SegmentWriter:
    settings = SegmentSettings(hot_segments=2, retention_hours=1e6)
    if not place.startswith("{"):
        return folder_writer(Path(place), settings)
    facts = json.loads(place)
    return bucket_writer(location(facts["uri"], facts["options"]), Path(facts["folder"]), settings)


def main() -> int:
    what = sys.argv[2]
    writer = opened(sys.argv[1])
    if what == "maintain":
        writer.maintain()
        return 0
    writer.append(entry(1))
    spool = writer.spool()
    spool.write(entry(2).rows)
    print("ready", flush=True)
    with Path(sys.argv[3]).open() as pipe:
        pipe.readline()
    attempts: list[Callable[[], None]] = [
        lambda: spool.publish(entry(2).end),
        lambda: writer.append(entry(2)),
        writer.maintain,
    ]
    for attempt in attempts:
        try:
            attempt()
        except LogFenced:
            print("fenced", flush=True)
        else:
            print("went through", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
