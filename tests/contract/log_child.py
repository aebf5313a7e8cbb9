"""A writer in a process of its own, made to be killed: appends the standard history to a bench's log.

Arguments: the bench's data as JSON, the first and last entry's numbers, and the numbers of those to spool.
"""

import json
import sys

import cdc.log
from tests.contract.logs import entry, settings_of


def main() -> None:
    data, first, last, spooled = (json.loads(word) for word in sys.argv[1:])
    writer = cdc.log.open_writer(settings_of(data))
    print("open", flush=True)
    for number in range(first, last + 1):
        this = entry(number, marks={str(number): "done"} if number % 2 else None)
        if number in spooled:
            spool = writer.spool()
            spool.write(this.rows.slice(0, 1))
            spool.write(this.rows.slice(1))
            spool.publish(this.end)
        else:
            writer.append(this)
        print(number, flush=True)
    writer.close()


if __name__ == "__main__":
    main()
