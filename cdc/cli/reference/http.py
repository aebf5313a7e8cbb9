"""Writes docs/metrics.md and docs/http.md from what the endpoint itself is made of."""

from pathlib import Path

from cdc.service.http import openapi
from cdc.service.observe.metric_families import FAMILIES
from cdc.service.observe.metrics import MOST_TABLES, document

_METRICS = f"""# Metrics

`GET /metrics`, in Prometheus's text format. Made by `make docs` from the list that the endpoint itself uses.

A lag grows while nothing moves: a store that is down, an apply process that died, a reader that is cut off from the
source and a source that does not answer all make `millrace_sink_lag_seconds` go up by a second each second. Counters
begin at 0 when the process that counts is started again, as Prometheus expects. Of a table-wise metric at most
{MOST_TABLES} tables are shown; the others share the label `(others)`: summed if counted, else the greatest.

"""

_HTTP = """# HTTP

The daemon answers on `http.host`:`http.port`, by default on loopback only. `GET /openapi.json` describes everything
below (OpenAPI 3.1); this page is made by `make docs` from the same list.

"""

_RULES = """
## Who is answered

- On loopback without a token: programs on this machine. The request's `Host` must be a name of this machine, so that a
  page in a browser cannot reach the endpoint through a name that it has pointed at 127.0.0.1.
- On any other address `http.token` is needed, and every request but `/livez` and the page's own files carries it:
  `Authorization: Bearer …`. The page asks for it once and keeps it for the tab. There is no TLS here: put a proxy in
  front.
- A POST is JSON (`content-type: application/json`), and is refused with 403 where a browser says that it comes from
  another site.

## Bounds

| what | bound |
|---|---|
| head of a request | 16 kB, within 10 s |
| body | 16 kB, within 5 s |
| a request with its answer | 75 s; `wait` at most 60 s |
| connections | 512; idle ones are closed after 5 s |
| searches for a row (`why`) | 2 at a time, 20 s each |

Nothing here waits for a store or the log: a thread looks at the pipeline once a second (fifty times while somebody
waits), and answers come from what it saw.

## Reading your own writes

A store that follows a database lags behind it, by a second or so. Where a program must see its own write, it takes the
position of the WAL after its commit and waits until the store has reached it:

```python
import psycopg
import redis

from cdc.client import Freshness

fresh = Freshness("http://127.0.0.1:8080", "redis")
with psycopg.connect("dbname=shop") as connection:
    connection.execute("update users set email = 'new@example.org' where id = 7")
    connection.commit()
    fresh.after(connection, timeout=10)  # raises Stale if the store is not there in time
    print(redis.Redis().get("public.users:7"))
```

`position(connection)` and `wait(lsn)` are the two halves, for a program that writes here and reads elsewhere: the
position is a short text that can go into a cookie or a header. Commit before you ask: a position taken inside the
transaction covers nothing of it. With `synchronous_commit` off in the session the insert position is taken, since the
commit may not have been written yet; where it was off for the transaction only (`set local`), pass `asynchronous=True`.
For OpenSearch read the document by its id: a search sees it after the index's next refresh.

A sink has reached nothing until it holds the whole first snapshot, also where that was cut short and goes on in chunks:
a row from before may be in its last piece. What is waited for besides are changes: rows that `millrace backfill` or the
mode `incremental` is still reading are not.

## What a position does not cover

`/v1/wait`, `/v1/cut` and `/readyz` name in `except` what the stores lack whatever their positions say, each with its
`kind`, `sink` (empty: every sink), `table` (empty: every table), `message`, `remedy` and `count`. In Python it is
`Freshness.excepted`.

| kind | what is lacking |
|---|---|
| `waiting` | a table that a store cannot take, that is paused or catches up; no `sink`: that capture does not follow |
| `skipped` | a table that the sink was told to go on without |
| `refilling` | rows of a table that was skipped, until its backfill has ended |
| `lost` | a table that its store held and has lost, until it is filled again |
| `gap` | rows that a sink never saw, because it is younger than the log's oldest entry |
| `dead letters` | `count` changes of a table that the store refused |
| `first snapshot` | the first snapshot is not whole: no position counts yet |
| `backfill` | rows of a table that are read for the first time, or whose backfill failed or was cancelled |

A table that waits or was lost is waited for: the sink has reached nothing beyond its place, unless
`except_waiting=true` leaves such tables out or `table=` names others. The other kinds are said, and not waited for.
Dead letters are counted after the position was read, so none that was parked on the way there is missed.

What capture says of the source's present end counts only while its process runs: after a restart, a `wait` for the
newest LSN is answered when the new process has caught up.
"""


def http() -> str:
    """docs/http.md."""
    rows = ["| method | path | what |", "|---|---|---|"]
    rows += [f"| {one.method} | `{_address(one)}` | {one.summary} |" for one in openapi.OPERATIONS]
    return _HTTP + "\n".join(rows) + "\n" + _RULES


def _address(operation: openapi.Operation) -> str:
    asked = "&".join(f"{query.name}=…" for query in operation.queries)
    return f"{operation.path}?{asked}" if asked else operation.path


def metrics() -> str:
    """docs/metrics.md."""
    return _METRICS + document(FAMILIES)


if __name__ == "__main__":
    Path("docs/http.md").write_text(http(), encoding="utf-8")
    Path("docs/metrics.md").write_text(metrics(), encoding="utf-8")
