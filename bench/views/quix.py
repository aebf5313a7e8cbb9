"""The measured views in Quix Streams, as far as it can express them. Needs the package `quixstreams` and nothing else.

    python -m bench.views.quix JSON

Settings and commands are those of `bench.views.structured`; a phase also ends when no message comes for some seconds.
LIMITS says what each result is not.
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bench.cpu_meter import tree_cpu

LIMITS: Mapping[str, str] = {
    "documents": "orders with their items, without the customer: state is kept by one key, so a change of a customer "
    "cannot reach the customer's orders; a reader can see an order between the changes of one transaction",
    "joins": "the posts and followers of an author are one value in the state, written by hand; a reader can see the "
    "result between the changes of one transaction",
    "windows": "one partition, since the total has one key; what is later than the grace period is dropped",
}
_IDLE_SECONDS = {"catch_up": 10.0, "live": 15.0}
_GRACE_MS, _MINUTE_MS = 1_800_000, 60_000
_EVERY = 500
Change = Mapping[str, Any]


def _rows(app: Any, settings: Mapping[str, Any], table: str, key: str) -> Any:  # noqa: ANN401
    """The changes of a table as a stream keyed by one of its columns."""
    stream = app.dataframe(app.topic(settings["topics"][table]))
    stream = stream.filter(lambda change: change is not None)
    stream = stream.apply(
        lambda change: {
            "table": table,
            "key": (change["after"] or change["before"])[key],
            "id": (change["after"] or change["before"]).get("id"),
            "row": change["after"],
            "old": change["before"],
            "ts_us": change["source"]["ts_us"],
        }
    )
    return stream.group_by("key", name=key)


def documents(app: Any, settings: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """An order with its items after each change of one of them."""
    orders = _rows(app, settings, "public.orders", "id")
    items = _rows(app, settings, "public.items", "order_id")
    return orders.concat(items).apply(document, stateful=True).filter(lambda found: found is not None)


def document(change: Change, state: Any) -> dict[str, Any] | None:  # noqa: ANN401
    """The document of the changed order, unless the order has not come yet."""
    stored = state.get("document", {"order": None, "items": {}})
    if change["table"] == "public.orders":
        stored["order"] = change["row"]
    elif change["row"] is None:
        stored["items"].pop(str(change["id"]), None)
    else:
        stored["items"][str(change["id"])] = change["row"]
    state.set("document", stored)
    if stored["order"] is None:
        return None
    return {**stored["order"], "items": list(stored["items"].values()), "ts_us": change["ts_us"]}


def joins(app: Any, settings: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """The rows of the timelines that a change of a post or of a follow adds or takes away."""
    posts = _rows(app, settings, "public.posts", "author")
    follows = _rows(app, settings, "public.follows", "followee")
    return posts.concat(follows).apply(lambda change, state: list(timeline(change, state)), stateful=True, expand=True)


def timeline(change: Change, state: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401
    """Rows of followers and posts of one author; `deleted` ones are gone."""
    posts, followers = state.get("posts", {}), state.get("followers", [])
    gone = change["row"] is None
    if change["table"] == "public.posts":
        post = str(change["id"])
        changed = {post: (change["row"] or change["old"])["title"]}
        posts = {number: title for number, title in posts.items() if number != post} if gone else {**posts, **changed}
        pairs = [(follower, number) for follower in followers for number in changed]
        state.set("posts", posts)
    else:
        follower = (change["row"] or change["old"])["follower"]
        followers = [other for other in followers if other != follower] + ([] if gone else [follower])
        pairs = [(follower, number) for number in posts]
        changed = posts
        state.set("followers", followers)
    for follower, number in pairs:
        yield {
            "follower": follower,
            "post": number,
            "title": changed[number],
            "deleted": gone,
            "ts_us": change["ts_us"],
        }


def windows(app: Any, settings: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """Cents and sales per minute, after each change."""
    topic = app.topic(settings["topics"]["public.sales"], timestamp_extractor=_placed_ms)
    sales = app.dataframe(topic).filter(lambda change: change is not None).apply(_added)
    one = sales.group_by(lambda _: "all", name="all")
    return one.tumbling_window(_MINUTE_MS, grace_ms=_GRACE_MS, on_late=_late).reduce(_sum, dict).current()


def _placed_ms(change: Change | None, headers: object, timestamp: int, kind: object) -> int:
    from datetime import datetime

    if change is None:
        return timestamp
    return int(datetime.fromisoformat((change["after"] or change["before"])["placed_at"]).timestamp() * 1000)


def _added(change: Change) -> dict[str, int]:
    after, before = change["after"] or {}, change["before"] or {}
    return {
        "cents": after.get("cents", 0) - before.get("cents", 0),
        "sales": int(bool(after)) - int("cents" in before),
        "ts_us": change["source"]["ts_us"],
    }


def _sum(total: dict[str, int], added: dict[str, int]) -> dict[str, int]:
    cents, sales = total["cents"] + added["cents"], total["sales"] + added["sales"]
    return {"cents": cents, "sales": sales, "ts_us": max(total["ts_us"], added["ts_us"])}


_dropped = [0]


def _late(*_: object) -> bool:
    _dropped[0] += 1
    return False


KINDS: Mapping[str, Callable[[Any, Mapping[str, Any]], Any]] = {
    "documents": documents,
    "joins": joins,
    "windows": windows,
}


def run(settings: Mapping[str, Any], phase: str) -> dict[str, Any]:
    """Process messages until none comes for a while. The first some hundred are not counted."""
    marks: list[tuple[float, float]] = []
    seen = [0]

    def note(*_: object) -> None:
        seen[0] += 1
        if seen[0] % _EVERY == 0:
            marks.append((time.monotonic(), tree_cpu(os.getpid())))

    _dropped[0] = 0
    app = importlib.import_module("quixstreams").Application(
        broker_address=settings["bootstrap"], consumer_group=settings["out"], auto_offset_reset="earliest",
        state_dir=settings["home"], loglevel="ERROR", on_message_processed=note, use_changelog_topics=True,
    )  # fmt: skip
    result = KINDS[settings["kind"]](app, settings)
    result.to_topic(app.topic(settings["out"], key_serializer="json"))
    app.run(timeout=_IDLE_SECONDS[phase], collect=False)
    if len(marks) < 2:
        return {"seconds": 0.0, "cpu_seconds": 0.0, "share": 0.0}
    (begun, cpu), (ended, used) = marks[0], marks[-1]
    share = (len(marks) - 1) * _EVERY / seen[0]
    return {"seconds": ended - begun, "cpu_seconds": used - cpu, "share": share, "rows_dropped_as_late": _dropped[0]}


def main() -> None:
    """Follow the commands."""
    settings = json.loads(sys.argv[1])
    for line in sys.stdin:
        command = line.strip()
        if command == "live":
            print(json.dumps({"ready": True}), flush=True)
            run(settings, command)
        elif command == "catch_up":
            print(json.dumps(run(settings, command)), flush=True)
        elif command == "end":
            break


if __name__ == "__main__":
    main()
