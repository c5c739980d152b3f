"""What trainers call: SGLang's pauses and updates, vLLM's sleep; and time in the queue."""

import threading

import httpx
import openai
import pytest
from serving import BATCH, Server
from test_admin import ask, others, path_is_known, restored, weights  # noqa: F401


def in_a_thread(server: Server, **changes):
    """Starts a request that runs; returns its thread and the list that its choice comes to."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(ask(server, **changes)))
    thread.start()
    server.settles(lambda m: m["num_requests_running"] > 0)
    return thread, answers


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_sample_that_is_paused_goes_on_with_new_weights(restored: Server, others, mode):  # noqa: F811
    version = restored.llm.engine.version
    with restored.slowly():
        thread, answers = in_a_thread(restored)
        assert restored.post("/pause_generation", json={"mode": mode}).json()["status"] == "ok"
    scheduler = restored.llm.engine.scheduler
    assert bool(scheduler.running) == (mode == "in_place") and thread.is_alive()
    body = {"model_path": str(others / "hf"), "flush_cache": True, "load_format": "auto"}
    said = restored.post("/update_weights_from_disk", json=body)
    assert said.json()["success"] and said.json()["version"] == version + 1, said.text
    thread.join(0.3)
    assert thread.is_alive(), "a pause lasts until it is ended"
    restored.post("/continue_generation", json={})
    thread.join()
    assert len(answers[0].token_ids) == 60 and answers[0].finish_reason == "length"


def test_a_pause_ends_samples_and_lets_new_ones_wait(server: Server, monkeypatch):
    whole = ask(server)
    monkeypatch.setattr(server.app.state.thread, "queue_seconds", 30.0)
    with server.slowly():
        thread, answers = in_a_thread(server)
        server.post("/pause_generation")
        thread.join()
    [cut] = answers
    assert cut.finish_reason == "abort" and 0 < len(cut.token_ids) < 60
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    late = []
    thread = threading.Thread(target=lambda: late.append(ask(server)))
    thread.start()
    thread.join(0.3)
    assert not late
    server.post("/continue_generation")
    thread.join()
    assert late[0].token_ids == whole.token_ids
    monkeypatch.setattr(server.app.state.thread, "queue_seconds", 0.0)
    assert ask(server).token_ids == whole.token_ids, "no request that ended is still counted"


def test_an_update_that_fails_says_so_in_the_shape_of_sglang(server: Server):
    said = server.post("/update_weights_from_disk", json={"model_path": "/nowhere"})
    assert said.status_code == 400 and said.json()["success"] is False
    assert "no such file" in said.json()["message"]


def test_sleep_under_the_names_of_vllm(restored: Server):  # noqa: F811
    before, asleep = ask(restored), []
    for path in ("/sleep?level=1", "/wake_up?tags=weights"):
        assert restored.post(path).status_code == 200
        headers = {"Authorization": "Bearer another key"}
        said = httpx.get(f"{restored.url}/is_sleeping", headers=headers)
        asleep.append(said.json()["is_sleeping"])
    assert asleep == [True, False] and ask(restored).token_ids == before.token_ids
    assert restored.post("/sleep?level=2").status_code == 400


def test_a_prompt_is_read_once_until_the_cache_is_flushed(server: Server):
    prompt = [int(i % 50) for i in range(60)]

    def cached():
        answer = server.client().completions.create(model="tiny", prompt=prompt, max_tokens=4)
        return answer.usage.prompt_tokens_details.cached_tokens

    cached()
    hits = server.metrics()["prefix_cache_hits_total"]
    assert cached() == 48 and server.metrics()["prefix_cache_hits_total"] == hits + 48
    assert server.post("/flush_cache").json()["success"]
    assert cached() == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_waits_too_long_for_a_slot_is_turned_away(
    server: Server, stream, monkeypatch
):
    asked = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 60, "stream": stream}
    with server.slowly():
        running = [in_a_thread(server, seed=seed, n=8) for seed in range(2)]
        server.settles(lambda m: m["num_requests_waiting"] >= 16 - BATCH)
        monkeypatch.setattr(server.app.state.thread, "queue_seconds", 0.0)
        with pytest.raises(openai.InternalServerError, match="waited") as caught:
            list(server.client().completions.create(**asked))
    assert caught.value.status_code == 503 and caught.value.response.headers["retry-after"]
    for thread, answers in running:
        thread.join()
        assert len(answers[0].token_ids) == 60
    assert server.app.state.thread.outstanding == 0
