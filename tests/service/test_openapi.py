import json

import pytest
from conftest import Gateway

from bench.malformed import bases
from service.app import ROUTES
from service.openapi import DOCUMENT

jsonschema = pytest.importorskip("jsonschema")


def test_every_route_is_described_and_nothing_else():
    described = {
        (path, method.upper())
        for path, item in DOCUMENT["paths"].items()
        for method in item
        if method != "parameters"
    }
    served = {
        (route.path.replace(":path", ""), method)
        for route in ROUTES
        for method in route.methods or ()
        if method != "HEAD"
    }
    assert described == served


@pytest.mark.slow
def test_real_bodies_are_valid():
    for path, body in bases(images=True):
        operation = DOCUMENT["paths"][path]["post"]
        schema = operation["requestBody"]["content"]["application/json"]["schema"]

        jsonschema.Draft202012Validator.check_schema(schema)
        jsonschema.validate(json.loads(body), schema)


async def test_it_is_served(gateway: Gateway):
    answer = await gateway.http.get("/openapi.json")
    assert answer.json() == DOCUMENT
