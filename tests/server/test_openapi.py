"""What the OpenAPI description allows, and what it does not, never meets a fault of ours."""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.generation import GenerationMode

MODES = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]


def ask(server, mode, count: int) -> int:
    """Each operation `count` times; how many were answered by 200."""
    schema, num_fine = schemathesis.openapi.from_url(f"{server.url}/openapi.json"), 0
    for found in schema.get_all_operations():
        operation = found.ok()
        if mode is GenerationMode.NEGATIVE and operation.method != "post":
            continue  # a body can be wrong; most others have nothing that could be

        @settings(
            max_examples=count,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def answered(case):
            nonlocal num_fine
            if "stream" in (case.query or {}):  # of the engine, which has no end
                return
            answer = case.call()
            assert answer.status_code < 500, (case.as_curl_command(), answer.text)
            num_fine += answer.status_code == 200

        answered()
    server.settle()
    server.service.model.engine.engine.check_integrity()
    return num_fine


@pytest.mark.parametrize("mode", MODES)
def test_no_request_is_a_fault_of_ours(server, mode):
    num_fine = ask(server, mode, 4)
    assert num_fine or mode is GenerationMode.NEGATIVE


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_no_request_of_many_is_a_fault_of_ours(server, mode):
    ask(server, mode, 120)
