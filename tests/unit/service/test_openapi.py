"""The API's description is valid, and describes what there is."""

from openapi_spec_validator import validate

from cdc.config.settings import Settings
from cdc.service.http import openapi
from cdc.service.http.routes import Endpoint

_PAGE = {"/", "/page.css", "/page.js", "/plots.js"}


def test_the_description_is_valid_openapi() -> None:
    validate(openapi.document())


def test_every_route_is_described_and_every_description_has_a_route() -> None:
    routes = {(route.path, method) for route in Endpoint(Settings()).routes() for method in route.methods or ()}
    described = {(path, verb.upper()) for path, verbs in openapi.document()["paths"].items() for verb in verbs}
    assert {route for route in routes if route[0] not in _PAGE and route[1] != "HEAD"} == described


def test_what_changes_something_is_a_post_and_says_that_it_may_be_refused() -> None:
    posts = [item for item in openapi.OPERATIONS if item.method == "POST"]
    assert {item.path for item in posts} == {"/v1/dead-letters/retry", "/v1/pause", "/v1/resume", "/v1/skip"}
    assert all(403 in item.refusals for item in posts)
