"""Requests generated from the OpenAPI description get only answers that it describes."""

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from elasticrec.repository.repository import Repository
from elasticrec.serving.process import ServerProcess
from support.harness import serving
from support.store import MODEL, publish

pytestmark = pytest.mark.slow


# Without the checks of accepted and refused data: slots and their values depend on the model, not on the description.
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Start a server with a model whose scores show its version."""
    directory = tmp_path_factory.mktemp("openapi")
    (directory / "models" / MODEL).mkdir(parents=True)
    repository = Repository.open(directory / "models", MODEL)
    repository.offer(publish(repository).number)
    with serving(f"models/{MODEL}", cwd=directory) as server:
        yield server


@pytest.fixture(scope="module")
def api(server: ServerProcess) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def test_every_answer_is_described(api: schemathesis.BaseSchema) -> None:
    """Valid and invalid requests: every answer is described, and none is an internal error."""
    tried = 0
    for found in api.get_all_operations():
        operation = found.ok()

        @given(case=operation.as_strategy() | operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))
        @settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        def check(case: schemathesis.Case) -> None:
            # Use an existing model, so that more than its name is tested.
            if "name" in (case.path_parameters or {}):
                case.path_parameters["name"] = MODEL
            case.call_and_validate(checks=CHECKS)

        check()
        tried += 1
    assert tried > 20


def test_the_page_loads_nothing_from_other_hosts(server: ServerProcess) -> None:
    import urllib.request

    with urllib.request.urlopen(f"{server.url}/docs", timeout=60) as answer:
        page = answer.read().decode()
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "openapi.json" in page and "http" not in page.replace("http-equiv", "")
