"""A server of packed weights: what it says of them, and what an administrator does to them."""

import logging
import re

import jax
import openai
import pytest
from serving import KEY, config, served

from serve import __main__ as program
from serve.settings import load_llm
from specjax import LLM, EngineConfig
from specjax.checkpoint import huggingface as hf
from specjax.checkpoint.store import Checkpointer

PRODUCTS = {"embed": "xla", "*": "int8"}
PROMPT = [5, 6, 7]


def tokens_of(server) -> list[int]:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=120)
    more = {"ignore_eos": True, "return_token_ids": True}
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, seed=3, max_tokens=40, extra_body=more
    )
    return answer.choices[0].token_ids


def test_weights_are_packed_when_they_come_and_kept_while_it_sleeps(thin_policy, tmp_path):
    cfg, policy, _ = hf.load_checkpoint(thin_policy, "float32")
    other = jax.tree.map(lambda x: 1.25 * x[..., ::-1], policy)
    hf.save_checkpoint(tmp_path / "hf", cfg.replace(mtp_num_layers=0), other)
    with Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.save(4, {"policy": other}, {}, block=True)
    nan = jax.tree.map(lambda x: x * float("nan"), policy)
    hf.save_checkpoint(tmp_path / "nan", cfg.replace(mtp_num_layers=0), nan)

    how = {"engine": {"products": PRODUCTS}, "speculation": {"strategy": "off"}}
    settings = config(thin_policy, **how)
    with served(settings, load_llm(settings)) as server:
        first = tokens_of(server)
        for name in ("run", "hf"):
            answer = server.post("/update_weights", json={"path": str(tmp_path / name)})
            assert answer.status_code == 200, answer.text
            second = tokens_of(server)
            assert second != first
        refused = server.post("/update_weights", json={"path": str(tmp_path / "nan")})
        assert refused.status_code == 400 and "not finite" in refused.text
        assert server.post("/sleep").json() == {"status": "asleep"}
        assert not jax.tree.leaves((server.llm.params, server.llm.engine.runner.weights.policy))
        assert server.post("/wake").json()["status"] == "ok"
        assert tokens_of(server) == second
        weights = server.llm.params
    engine = EngineConfig(products=PRODUCTS, chunk_tokens=8, prefill_chunk=16, page_size=16)
    fresh = LLM(tmp_path / "hf", None, max_batch=1, max_len=96, engine=engine).params
    assert jax.tree.structure(weights) == jax.tree.structure(fresh)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: (a == b).all(), weights, fresh)))


def test_the_start_says_the_formats_and_counts_weights(thin_policy, caplog):
    caplog.set_level(logging.INFO)
    texts = []
    for products in ("xla", PRODUCTS):
        caplog.clear()
        program._load(config(thin_policy, engine={"products": products, "warm_up": "none"}))
        texts.append(caplog.text)
    counts = [re.search(r"loaded (\S+) M weights", text)[1] for text in texts]
    assert counts[0] == counts[1]
    assert "weights: embed xla, * int8" in texts[1] and "weights:" not in texts[0]


@pytest.mark.parametrize(("products", "message"), [("{embed: int9}", "int9"), ("mxfp4", "mxfp4")])
def test_a_format_that_cannot_be_used_is_an_error_of_one_line(
    products, message, thin_policy, capsys
):
    with pytest.raises(SystemExit) as ended:
        program.main([f"model={thin_policy}", f"engine.products={products}", "port=0"])
    texts = str(ended.value.code), capsys.readouterr().err
    [line] = [line for text in texts for line in text.splitlines() if "error: " in line]
    assert message in line
