"""/metrics over a real daemon: counts are exact, and nothing that a client wrote becomes a label."""

from __future__ import annotations

import asyncio
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

CHAT = "/v1/chat/completions"


def question(model: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "x"}], **fields}


async def scraped(daemon: Any) -> dict[str, float]:
    """Samples by name; those with other labels than the model's are summed."""
    answer = await daemon.http.get("/metrics")
    assert answer.status_code == 200
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


async def test_ten_requests_of_ten_tokens_are_counted_exactly(start_daemon: Any) -> None:
    daemon = await start_daemon(scripted={"replies": {}})
    body = question(daemon.model, max_tokens=10, ignore_eos=True)
    await asyncio.gather(*(daemon.http.post(CHAT, json=body) for _ in range(10)))
    found = await scraped(daemon)
    assert found["vllm:time_to_first_token_seconds_count"] == 10
    assert found["vllm:inter_token_latency_seconds_count"] == 90
    assert found["vllm:generation_tokens_total"] == 100
    assert found["vllm:request_success_total"] == 10
    assert found["vllm:e2e_request_latency_seconds_count"] == 10
    assert found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0
    assert found["vllm:request_generation_tokens_sum"] == 100


async def test_series_exist_before_the_first_request(start_daemon: Any) -> None:
    found = await scraped(await start_daemon())
    for name in ("vllm:time_to_first_token_seconds_count", "vllm:generation_tokens_total", "vllm:num_requests_running"):
        assert found[name] == 0


async def test_counters_go_on_over_a_restart(start_daemon: Any) -> None:
    daemon = await start_daemon(scripted={"replies": {}})
    body = question(daemon.model, max_tokens=10, ignore_eos=True)
    await daemon.http.post(CHAT, json=body)
    await scraped(daemon)
    await daemon.http.post(f"/admin/v1/unload/{daemon.model}")
    await daemon.http.post(CHAT, json=body)
    found = await scraped(daemon)
    assert found["vllm:generation_tokens_total"] == 20
    assert found["inferd_engine_starts_total"] == 2


async def test_memory_parts_add_up(start_daemon: Any) -> None:
    daemon = await start_daemon()
    found = await scraped(daemon)
    assert found["inferd_memory_bytes"] == daemon.state.planner.host_ledger().total


async def test_labels_hold_no_text_of_clients(start_daemon: Any) -> None:
    daemon = await start_daemon()
    await daemon.http.post(CHAT, json=question("secret-model-name"))
    await daemon.http.get("/v1/models/secret-model-name")
    await daemon.http.get("/secret-path")
    text = (await daemon.http.get("/metrics")).text
    assert "secret" not in text
    assert 'handler="/v1/chat/completions"' in text
    assert 'handler="/v1/models/{name:path}"' in text
    assert text.count("\n") < 4000
