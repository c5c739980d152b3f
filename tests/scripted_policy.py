"""A policy that writes given messages: the token before decides the next one, and nothing else.

Its layer adds nothing to the embedding, and the language-model head finds the embedding of the
token before. The chat template ends each prompt with a token that says how many messages there are,
from which the message of that turn follows.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from small_tokenizers import END, byte_level
from tokenizers import AddedToken

from specjax.checkpoint import huggingface as hf
from specjax.models.families.dense import dense_config
from specjax.models.transformer import init_params

TEMPLATE = """{%- for t in tools or [] %}{{ t | tojson }}
{% endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}<|turn {{ messages | length }}|>"""


def write(path: Path, turns: dict[int, str], template: str = TEMPLATE) -> Path:
    """Writes a policy in the layout of Hugging Face.

    Args:
      turns: the message to write, by the number of messages before it.
      template: the chat template.
    """
    tokenizer = byte_level()
    for size in range(5, 200):  # characters of a token, so many that no two tokens are equal
        chains = [
            [f"<|turn {count}|>", *(text[i : i + size] for i in range(0, len(text), size))]
            for count, text in turns.items()
        ]
        names = [name for chain in chains for name in chain]
        if len({*names}) == len(names):
            break
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in names])
    vocab = tokenizer.get_vocab_size()
    cfg = dense_config(
        vocab_size=vocab, hidden_size=64, intermediate_size=16, num_layers=1, num_heads=2,
        num_kv_heads=1, head_dim=16, max_position=4096, tie_embeddings=False,
        eos_token_ids=(tokenizer.token_to_id(END),),
    )  # fmt: skip
    embed = np.random.default_rng(0).standard_normal((vocab, 64)).astype(np.float32)
    head = np.zeros((64, vocab), np.float32)
    for chain in chains:
        ids = [tokenizer.token_to_id(name) for name in (*chain, END)]
        for token, following in zip(ids, ids[1:], strict=False):
            head[:, following] += embed[token]

    def weight(where, x):
        name = where[-1].key
        if name == "embed":
            return jnp.asarray(embed)
        if name == "lm_head":
            return jnp.asarray(head).reshape(x.shape) if x.shape == head.shape else head.T
        return jnp.ones_like(x) if "norm" in name else jnp.zeros_like(x)

    params = jax.tree_util.tree_map_with_path(weight, init_params(cfg, 0))
    files = path.with_name(f"{path.name}-tokenizer")
    files.mkdir(parents=True)
    tokenizer.save(str(files / "tokenizer.json"))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END,
            "clean_up_tokenization_spaces": False, "chat_template": template}  # fmt: skip
    (files / "tokenizer_config.json").write_text(json.dumps(said))
    hf.save_checkpoint(path, cfg, params, None, files)
    return path
