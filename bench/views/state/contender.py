"""One contender of the bake-off, in a process of its own: it reads batches, keeps state, and prints what it measured.

    python -m bench.views.state.contender JSON

The JSON object has the fields of `Settings`. A second process with the same `home` goes on where the first has ended.
"""

import json
import sys

from bench.views.state.measured import Settings

ARROW = "state_tables"
CONTENDERS = ("built_in", "by_rows", "by_pandas", ARROW)


def main() -> None:
    """Print one line of JSON."""
    settings = Settings(**json.loads(sys.argv[1]))
    if settings.contender == ARROW:
        from bench.views.state.in_arrow import run
    else:
        from bench.views.state.in_spark import run
    print(json.dumps(run(settings)))


if __name__ == "__main__":
    main()
