"""The server's metrics after known traffic."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable

from prometheus_client.parser import text_string_to_metric_families

from glm_multiuser.server.http_protocol import HEADER_FIELDS, URL_BYTES
from glm_multiuser.server.metrics import GAUGES
from tests.engine.mixed_runner import MixedRunner
from tests.engine.mock_runner import BYTES_PER_TOKEN
from tests.engine.stepping import SingleSteps
from tests.server.asking import (
    FAILS,
    Wire,
    ask,
    errors_of,
    get,
    in_background,
    is_idle,
    llm_that_fails,
    long_prompts,
    post,
    step,
    tokens_alone,
)
from tests.server.in_process import (
    PATIENCE,
    InProcessServer,
    in_process_server,
    mock_llm,
    mock_settings,
    wait_until,
)


def samples(server: InProcessServer) -> dict[tuple[str, ...], float]:
    """(name, values in the order of their labels' names) -> value, as a scraper reads them."""
    return parsed(server.service.metrics.text().decode())


def samples_between_steps(server: InProcessServer) -> dict[tuple[str, ...], float]:
    """When the step is counted, too, that ended the last answer."""
    with SingleSteps():
        return samples(server)


def parsed(text: str) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def by_last_label(server: InProcessServer, name: str) -> dict[str, float]:
    return {key[-1]: value for key, value in samples(server).items() if key[0] == name}


def assert_becomes(look: Callable[[], Any], expected: Any) -> None:
    """Who reads an answer may be a little earlier than who counts it."""
    try:
        wait_until(lambda: look() == expected)
    except AssertionError:
        assert look() == expected


def test_a_scraper_can_read_it() -> None:
    with in_process_server() as server:
        ask(server, "ab")
        response = get(server, "/metrics")
        assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert parsed(response.text)["glm_requests_total", "mock", "length"] == 1


def ending_prompts() -> tuple[str, str]:
    """A question whose answer ends by itself, and one whose answer is cut at its longest."""
    by_itself = next(
        f"short {number}" for number in range(1000) if len(tokens_alone(f"short {number}")) < 20
    )
    return by_itself, long_prompts(1)[0]


def test_every_end_is_counted_by_its_name() -> None:
    by_itself, cut = ending_prompts()
    with in_process_server(mock_settings(users=1, max_queue=1), llm_that_fails) as server:
        for prompt, count in ((by_itself, 3), (cut, 2), ("a" + FAILS, 1)):
            for _ in range(count):
                ask(server, prompt)
        with SingleSteps() as steps:
            late = in_background(post, server, "/", {"prompt": cut}, x_request_timeout="0.01")
            wait_until(lambda: server.service.requests == 7)
            leaver = Wire(server.url).request("/", {"prompt": cut})
            wait_until(lambda: server.service.requests == 8)
            assert ask(server, cut).status_code == 429
            assert ask(server, cut, model="nobody").status_code == 404
            leaver.close()
            wait_until(lambda: server.service.running == 1)
            wait_until(lambda: None not in errors_of(server))
            steps.step()
        assert late.result(PATIENCE).status_code == 504
        outcomes = {"stop": 3, "length": 2, "error": 1, "deadline_exceeded": 1, "cancelled": 1}
        assert_becomes(
            lambda: by_last_label(server, "glm_requests_total"), {**outcomes, "refused": 1}
        )
        # The client that had disconnected got none.
        statuses = {"200": 5, "404": 1, "429": 1, "500": 1, "504": 1}
        assert_becomes(lambda: by_last_label(server, "glm_http_responses_total"), statuses)


def test_answers_that_would_have_fitted_without_the_others_are_not_counted() -> None:
    by_itself, _ = ending_prompts()
    with in_process_server(mock_settings(users=1, max_queue=2)) as server:
        with SingleSteps():
            running = in_background(ask, server, by_itself)
            server.wait_until_running(1)
            refused = post(server, "/v1/completions", {"prompt": ["ab", "cd", "ef"]})
            assert refused.status_code == 429
            assert server.service.running == server.service.requests == 1
        assert running.result(PATIENCE).status_code == 200
        outcomes = {"stop": 1, "refused": 1}
        assert_becomes(lambda: by_last_label(server, "glm_requests_total"), outcomes)


def test_responses_before_a_request_is_read_are_counted() -> None:
    heads = {
        "400": b"no HTTP\r\n\r\n",
        "414": b"GET /" + b"x" * URL_BYTES + b" HTTP/1.1\r\n\r\n",
        "431": b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * (HEADER_FIELDS + 1) + b"\r\n",
    }
    with in_process_server() as server:
        for head in heads.values():
            wire = Wire(server.url)
            wire.send(head)
            wire.read_to_end()
            wire.close()
        assert by_last_label(server, "glm_http_responses_total") == dict.fromkeys(heads, 1)


def test_every_way_to_be_refused_is_counted() -> None:
    settings = mock_settings(users=1, max_queue=1, limits={"requests_per_user": 1})
    with in_process_server(settings) as server:
        ask(server, "a" * 96)
        post(server, "/", {"prompt": "ab"}, x_session_id="x" * 257)
        with SingleSteps():
            running = in_background(post, server, "/", {"prompt": "ab"}, x_session_id="me")
            wait_until(lambda: server.service.running == 1)
            post(server, "/", {"prompt": "ab"}, x_session_id="me")
            server.end()
            wait_until(lambda: server.service.state == "draining")
            ask(server, "ab")
            assert samples(server)["glm_requests_total", "mock", "refused"] == 4
        assert running.result(PATIENCE).status_code == 200


def test_times_are_measured_for_every_token_and_step() -> None:
    by_itself, cut = ending_prompts()
    with in_process_server(mock_settings(users=1)) as server:
        before = samples_between_steps(server)  # the warm-up counts as tokens and steps, too
        prompts = (by_itself, cut, cut)
        for prompt in prompts:
            ask(server, prompt)
        tokens, answers = sum(len(tokens_alone(prompt)) for prompt in prompts), len(prompts)
        expected = {
            ("glm_ttft_seconds_count", "mock"): answers,
            ("glm_itl_seconds_count", "mock"): tokens - answers,
            ("glm_step_seconds_count", "prefill", "mock"): answers,
            ("glm_step_seconds_count", "decode", "mock"): tokens - answers,
            ("glm_batch_rows_count", "mock"): tokens - answers,
            ("glm_batch_rows_sum", "mock"): tokens - answers,
            ("glm_generated_tokens_total", "mock"): tokens,
            ("glm_prompt_tokens_total", "mock"): sum(len(prompt) + 1 for prompt in prompts),
            ("glm_steps_total", "mock"): tokens,
        }

        def grew() -> dict[tuple[str, ...], float]:
            after = samples(server)
            return {key: after.get(key, 0) - before.get(key, 0) for key in expected}

        assert_becomes(grew, expected)
        after = samples(server)
        assert after["glm_ttft_seconds_sum", "mock"] > 0
        assert after["glm_step_seconds_sum", "decode", "mock"] > 0


def test_users_of_one_step_are_counted_together() -> None:
    with in_process_server(mock_settings(users=2)) as server:
        with SingleSteps() as steps:
            before = samples(server)
            asked = [in_background(ask, server, long_prompts(1)[0]) for _ in range(2)]
            wait_until(lambda: server.service.running == 2)
            for _ in range(3):  # prefill; prefill and decode of one; decode of both
                steps.step()
            after = samples(server)
            grew = {key: value - before.get(key, 0) for key, value in after.items()}
            assert grew["glm_batch_rows_count", "mock"] == 2
            assert grew["glm_batch_rows_sum", "mock"] == 3
            assert after["glm_active_users", "mock"] == 2
            assert before["glm_active_users", "mock"] == 0
        for one in asked:
            one.result(PATIENCE)


def test_a_step_with_prompts_and_decode_rows_is_one_decode_step() -> None:
    open_llm = partial(mock_llm, runner_class=MixedRunner)
    with in_process_server(mock_settings(users=2), open_llm) as server:
        asked = []
        with SingleSteps() as steps:
            before = samples(server)
            for count in (1, 2):
                asked.append(in_background(ask, server, long_prompts(1)[0]))
                server.wait_until_running(count)
                steps.step()
            grew = {key: value - before.get(key, 0) for key, value in samples(server).items()}
            assert grew["glm_step_seconds_count", "prefill", "mock"] == 1
            assert grew["glm_step_seconds_count", "mixed", "mock"] == 1
            assert grew["glm_batch_rows_count", "mock"] == 1
            assert grew["glm_batch_rows_sum", "mock"] == 2
        for one in asked:
            one.result(PATIENCE)


def test_slots_queue_and_generations_that_wait_are_shown() -> None:
    with in_process_server(mock_settings(users=1, max_queue=3)) as server:
        idle = samples(server)
        assert {(f"glm_{name}", "mock") for name, _, _ in GAUGES} <= set(idle)
        assert idle["glm_users", "mock"] == 1
        stats = server.llm().stats()
        assert idle["glm_cache_bytes", "reserved", "mock"] == stats.cache_bytes_per_user
        assert idle["glm_cache_bytes", "resident", "mock"] == 0
        assert idle["glm_compiles_after_ready", "mock"] == 0
        with SingleSteps() as steps:
            asked = [in_background(post, server, "/", {"prompt": "ab"}, x_session_id="me")]
            wait_until(lambda: server.service.running == 1)
            steps.step()
            asked.append(in_background(step, server, "an id", "question 0"))
            wait_until(lambda: server.service.running == 2)
            busy = samples(server)
        assert busy["glm_active_users", "mock"] == 1
        assert busy["glm_queue_depth", "mock"] == 1
        tokens = server.llm().slots()[0].prompt_tokens
        assert busy["glm_cache_bytes", "resident", "mock"] == tokens * BYTES_PER_TOKEN
        assert busy["glm_step_entries",] == 1
        answers = [one.result(PATIENCE) for one in asked]
        assert [answer.status_code for answer in answers] == [200, 200]
        flag = answers[-1].json()["flag"]  # may be the end at once
        while flag != "end":
            flag = step(server, "an id").json()["flag"]
        wait_until(lambda: is_idle(server))
        rest = samples(server)
        assert (rest["glm_idle_users", "mock"], rest["glm_step_entries",]) == (0, 0)
        assert rest["glm_compiles_after_ready", "mock"] == 0


def test_a_slot_that_is_kept_for_its_user_is_idle() -> None:
    with in_process_server() as server:
        post(server, "/", {"prompt": "ab"}, x_session_id="me")
        wait_until(lambda: is_idle(server))
        assert samples(server)["glm_idle_users", "mock"] == 1


def test_a_graph_that_is_compiled_in_service_is_seen() -> None:
    with in_process_server() as server:
        runner: Any = server.llm()._runner
        runner.compiles += 1
        assert samples(server)["glm_compiles_after_ready", "mock"] == 1


def test_models_are_counted_apart_and_only_while_they_are_ready() -> None:
    with in_process_server(mock_settings(names=("one", "two"))) as server:
        ask(server, "ab", model="two", max_tokens=3)
        found = samples(server)
        assert found["glm_requests_total", "two", "length"] == 1
        assert ("glm_requests_total", "one", "length") not in found
        assert found["glm_ttft_seconds_count", "two"] == 1
        server.service.models.get("one").set_state("failed", "")
        found = samples(server)
        assert ("glm_users", "one") not in found
        assert ("glm_users", "two") in found
        server.service.models.get("one").set_state("ready")
