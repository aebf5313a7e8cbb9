"""The list of HTTP operations, from which the routes, `/openapi.json` and docs/http.md are made."""

from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_SECONDS: Schema = {"type": "number", "minimum": 0}
_LSN: Schema = {"type": "string", "pattern": "^[0-9A-Fa-f]{1,8}/[0-9A-Fa-f]{1,8}$", "example": "16/B374D848"}
_TEXTS: Schema = {"type": "array", "items": _TEXT}
_ANY: Schema = {"type": "object", "additionalProperties": True}


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "required": list(properties), "properties": properties}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


_KINDS = ("waiting", "skipped", "refilling", "lost", "gap", "dead letters", "first snapshot", "backfill")
_KIND: Schema = {"type": "string", "enum": list(_KINDS)}
_EXCEPT = _list(_ref("Excepted"))

SCHEMAS: dict[str, Schema] = {
    "Error": _object(error=_TEXT),
    "Excepted": _object(kind=_KIND, sink=_TEXT, table=_TEXT, message=_TEXT, remedy=_TEXT, count=_COUNT),
    "Readiness": _object(
        ready={"type": "boolean"},
        state={"enum": ["active", "standby"]},
        reasons=_list(_object(part=_TEXT, message=_TEXT, remedy=_TEXT)),
        **{"except": _EXCEPT},
    ),
    "Waited": {
        "type": "object",
        "required": ["reached", "lsn", "except"],
        "properties": {"reached": {"type": "boolean"}, "lsn": _LSN, "behind": _TEXTS, "except": _EXCEPT},
    },
    "Cut": _object(lsn=_LSN, **{"except": _EXCEPT}),
    "Status": _object(capture=_ANY, apply=_ANY, daemon=_ANY, log=_object(head=_LSN), reached=_ANY),
    "Flow": _object(capture=_TEXT, captured=_COUNT, head=_LSN, slot=_ANY, sinks=_list(_ANY), tables=_ANY),
    "History": _object(sinks=_TEXTS, samples=_list(_object(time=_SECONDS, lag=_list(_COUNT), changes=_list(_COUNT)))),
    "Story": _object(table=_TEXT, events=_list(_object(event=_ANY, entry=_LSN, sinks=_ANY, batches=_ANY)), stored=_ANY),
    "Letters": _object(
        total=_COUNT,
        letters=_list(_object(sink=_TEXT, table=_TEXT, lsn=_LSN, reason=_TEXT, attempts=_COUNT, parked_at=_TEXT)),
    ),
    "Retried": _object(asked=_COUNT),
    "Paused": _object(paused=_object(sinks=_TEXTS, tables=_TEXTS, skipped=_ANY)),
}


@dataclass(frozen=True, slots=True)
class Query:
    """A query parameter."""

    name: str
    schema: Schema
    meaning: str
    required: bool = False
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class Operation:
    """One path. `name` is the method of `Endpoint` that handles it; `answer` is a schema's name or a media type."""

    path: str
    name: str
    summary: str
    answer: str
    method: Literal["GET", "POST"] = "GET"
    queries: tuple[Query, ...] = ()
    body: Schema | None = None
    refusals: tuple[int, ...] = ()
    open: bool = False


_READYZ = "Whether every part and sink of the pipeline works; if not, 503 with the reasons. 200 for a standby."
_SINK = Query("sink", _TEXT, "Only this sink; may be repeated. Default: all.", repeated=True)
_TABLE = Query("table", _TEXT, "Only this table, as schema.name; may be repeated. Default: all.", repeated=True)
_BUT_WAITING = Query(
    "except_waiting",
    {"type": "boolean", "default": False},
    "Ignore tables that wait or are paused; `except` names them.",
)
_RETRY: Schema = {"type": "object", "properties": {"sink": _TEXT, "table": _TEXT, "lsn": _LSN}}

_RESUME: Schema = {"type": "object", "required": ["target"], "properties": {"target": _TEXT, "sink": _TEXT}}

OPERATIONS = (
    Operation("/livez", "livez", "Whether the daemon's event loop runs, and nothing else.", "text/plain", open=True),
    *(Operation(path, "readyz", _READYZ, "Readiness", refusals=(503,)) for path in ("/readyz", "/healthz", "/health")),
    Operation("/metrics", "metrics", "Metrics in Prometheus's text format.", "text/plain"),
    Operation("/openapi.json", "description", "This description.", "application/json"),
    Operation("/v1/status", "status", "The status of each part, and each sink's position.", "Status"),
    Operation(
        "/v1/wait",
        "wait",
        "Responds once the sinks hold everything committed up to an LSN; 504 after the timeout. `except` names what "
        "they lack even so.",
        "Waited",
        queries=(
            Query("lsn", _LSN, "From pg_current_wal_lsn(), called after the commit.", required=True),
            _SINK,
            _TABLE,
            _BUT_WAITING,
            Query("timeout", {**_SECONDS, "default": 10, "maximum": 60}, "Seconds."),
        ),
        refusals=(400, 404, 504),
    ),
    Operation(
        "/v1/cut", "cut", "The newest LSN that every sink has reached; `except` names what they lack even so.", "Cut",
        queries=(_SINK, _TABLE, _BUT_WAITING), refusals=(404,),
    ),
    Operation("/v1/flow", "flow", "Source, log and stores now, as the page shows them.", "Flow"),
    Operation("/v1/history", "history", "Samples of the last hour, one every five seconds, for plots.", "History"),
    Operation(
        "/v1/why",
        "why",
        "Every event of a key in the log, its outcome and batch in each sink, the version stored now; no row values.",
        "Story",
        queries=(
            Query("table", _TEXT, "As schema.name.", required=True),
            Query("key", _TEXT, 'A JSON object of the key columns: {"id":42}.', required=True),
        ),
        refusals=(400, 429, 503),
    ),
    Operation(
        "/v1/dead-letters", "dead_letters", "Dead letters, newest first; no keys, no row values.", "Letters",
        queries=(_SINK,), refusals=(404,),
    ),
    Operation(
        "/v1/dead-letters/retry", "retry", "Have the running pipeline retry dead letters.", "Retried",
        method="POST", body=_RETRY, refusals=(400, 403, 408, 413, 503),
    ),
    *(
        Operation(f"/v1/{verb}", verb, what, "Paused", method="POST", body=body, refusals=(400, 403, 408, 413, 503))
        for verb, what, body in (
            ("pause", "Pause a sink or a table.", _object(target=_TEXT)),
            ("resume", "Resume a sink, or a paused, waiting or skipped table (with `sink`: only there).", _RESUME),
            ("skip", "Have a sink skip a table; resuming refills it.", _object(target=_TEXT, sink=_TEXT)),
        )
    ),
)  # fmt: skip


def document() -> Schema:
    """The OpenAPI 3.1 document."""
    paths: dict[str, Schema] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _described(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Millrace", "version": version("millrace"), "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {"schemas": SCHEMAS, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{"token": []}, {}],
    }


def _described(operation: Operation) -> Schema:
    found: Schema = {
        "operationId": operation.path.strip("/").replace("/", "_").replace(".", "_").replace("-", "_"),
        "summary": operation.summary,
        "responses": {"200": {"description": "Done.", "content": _content(operation.answer)}},
    }
    if not operation.open:
        found["responses"]["401"] = {"description": "A token is needed.", "content": _content("Error")}
    for code in operation.refusals:
        body = operation.answer if operation.answer == "Readiness" or code == 504 else "Error"
        found["responses"][str(code)] = {"description": _REFUSED[code], "content": _content(body)}
    if operation.queries:
        found["parameters"] = [_parameter(query) for query in operation.queries]
    if operation.body is not None:
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": operation.body}}}
    if operation.open:
        found["security"] = []
    return found


_REFUSED = {
    400: "The request is malformed.",
    403: "The request comes from another site.",
    404: "There is no such sink or table.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    429: "Other searches are running; try again later.",
    503: "Not possible now; the body has the reason.",
    504: "The timeout is over; `behind` names the sinks that are late.",
}


def _content(answer: str) -> Schema:
    if "/" in answer:
        return {answer: {"schema": _TEXT if answer.startswith("text/") else _ANY}}
    return {"application/json": {"schema": _ref(answer)}}


def _parameter(query: Query) -> Schema:
    schema = _list(query.schema) if query.repeated else query.schema
    found = {"name": query.name, "in": "query", "required": query.required, "description": query.meaning}
    return {**found, "schema": schema}
