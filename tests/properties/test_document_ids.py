"""A document's id in a request is its id, whichever way it was found."""

import json

from hypothesis import given
from hypothesis import strategies as st

from sinks.opensearch_mapping import document_id, raw_document_id
from sinks.raw_json import quote

values = st.one_of(
    st.integers().map(str),
    st.decimals(allow_nan=False, allow_infinity=False).map(str),
    st.text(max_size=200).map(lambda text: json.dumps(text, ensure_ascii=False)),
    st.text("é☃🦀a", min_size=100, max_size=300).map(lambda text: json.dumps(text, ensure_ascii=False)),
    st.sampled_from(['""', '"sha256:x"', '"1"', "true", "null", '"}"', '":1}"', '"a\\"b"', "1e5", "-0", '"{"']),
)
names = st.text('abc":{}\\ é', min_size=1, max_size=5).map(lambda name: json.dumps(name, ensure_ascii=False))


@given(st.dictionaries(names, values, min_size=1, max_size=3))
def test_the_quick_way_to_an_id_gives_the_same_id(columns: dict[str, str]) -> None:
    key = "{" + ",".join(f"{name}:{value}" for name, value in columns.items()) + "}"
    assert raw_document_id(key) == quote(document_id(key)).encode()
    assert 0 < len(document_id(key).encode()) <= 512
