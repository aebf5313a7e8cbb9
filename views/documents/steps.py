"""The parts of a document as steps: each part becomes a JSON object, and each row gets those that belong to it."""

from collections.abc import Sequence

import pyarrow as pa

from views.dataflow.cells import Member, Renamed, Selected
from views.dataflow.collect import INPUT, ITEM, KEY, LIST, ORDER, TEXT, Collect
from views.dataflow.graph import GraphBuilder
from views.dataflow.join import Join, Side
from views.dataflow.output import ROW
from views.dataflow.rekey import Rekeyed
from views.documents.parts import Match, Part

_TEXT = pa.string()
_SHOWN = (ORDER, TEXT, ITEM)
_ONE = pa.schema([(KEY, _TEXT), (ITEM, _TEXT)])
_MANY = pa.schema([(KEY, _TEXT), (LIST, _TEXT)])
_LINK = pa.schema([(KEY, _TEXT), ("_far", _TEXT)])
_FAR = pa.schema({"_far": _TEXT, **{name: INPUT[name] for name in _SHOWN}})


def add_documents(steps: GraphBuilder, root: Part, view: str) -> None:
    """Add the steps of a view; the last one gives its rows."""
    documents = _add_part(steps, root, view, root.key)
    key = tuple(Member(name, name) for name in root.key)
    keyed = steps.add(f"{view} key", Selected((ITEM,), objects=(("_key", key),)).step, [documents])
    rows = steps.add(f"{view} rows", Renamed(((ITEM, ROW), ("_key", "_key"))).step, [keyed])
    steps.add(view, Rekeyed("_key", view).step, [rows], f"one document per row of {root.table}")


def _add_part(steps: GraphBuilder, part: Part, path: str, need: Sequence[str]) -> int:
    """The rows of a part as JSON objects (ITEM), with what orders them and the cells of the columns `need`."""
    at, held = _add_cells(steps, part, path, need)
    members = [Member(name, name) for name in part.columns]
    for number, (name, match, child) in enumerate(part.children):
        inner = f"{path}.{name}"
        found = _add_part(steps, child, inner, match.of_part)
        found, columns = _add_matched(steps, found, match, inner)
        own = Side(f"_outer{number}", held, tuple(held.names))
        joined = Join(own, Side(KEY, columns, ("", f"_member{number}")), "left")
        text = f"each row gets its {name}, looked up by ({', '.join(match.outer)})"
        at = steps.add(f"{inner} in {path}", joined.step, [at, found], text, joined.tables)
        held = joined.schema
        members.append(Member(name, f"_member{number}", "[]" if match.many else "null"))
    document = Selected(
        tuple(dict.fromkeys(need)), objects=((ITEM, tuple(members)),), orders=((ORDER, TEXT, part.order),)
    )
    return steps.add(f"{path} document", document.step, [at], f"{part.table} as a JSON object")


def _add_cells(steps: GraphBuilder, part: Part, path: str, need: Sequence[str]) -> tuple[int, pa.Schema]:
    """The columns of a part, and the keys by which it finds what it includes."""
    cells = sorted({*part.columns, *need, *part.key, part.order})
    keys = tuple((f"_outer{number}", match.outer) for number, (_, match, _) in enumerate(part.children))
    step = Selected(tuple(cells), keys).step
    at = steps.add(f"{path} cells", step, [steps.input(part.table)], f"reads {part.table}")
    return at, pa.schema([(name, _TEXT) for name in (*cells, *(name for name, _ in keys))])


def _add_matched(steps: GraphBuilder, found: int, match: Match, path: str) -> tuple[int, pa.Schema]:
    """For each row that a part belongs to (KEY), what the document shows of the part."""
    if match.link is not None:
        found = _add_link(steps, found, match, path)
    elif match.many:
        found = steps.add(f"{path} by row", Selected(_SHOWN, ((KEY, match.own),)).step, [found])
    else:
        return steps.add(f"{path} by row", Selected((ITEM,), ((KEY, match.own),)).step, [found]), _ONE
    lists = Collect()
    text = f"collects {path.rpartition('.')[2]} by ({', '.join(match.own)})"
    return steps.add(f"{path} list", lists.step, [found], text, lists.tables), _MANY


def _add_link(steps: GraphBuilder, found: int, match: Match, path: str) -> int:
    """The rows of a part by the rows that a linking table names."""
    assert match.link is not None
    ends = Selected((), ((KEY, match.own), ("_far", match.link_columns)))
    links = steps.add(f"{path} links", ends.step, [steps.input(match.link)], f"reads {match.link}")
    far = steps.add(f"{path} by link", Selected(_SHOWN, (("_far", match.far),)).step, [found])
    joined = Join(Side("_far", _LINK, (KEY, "")), Side("_far", _FAR, ("", *_SHOWN)), "inner")
    name = f"{path} through {match.link.name}"
    return steps.add(name, joined.step, [links, far], f"joins {match.link}", joined.tables)
