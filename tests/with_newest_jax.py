"""Which test files run with the newest jax, too, and what each shows there.

The whole suite runs once, on Python 3.11 with the first supported jax. The second run, on Python
3.12 with the newest jax, runs this selection (`SPECJAX_TESTS=jax`, a step of `.ci/run`): what a
version of jax can change is what programs compute, how they are compiled, placed and shared out,
and jax's own interfaces. The compiler of the newest jax takes twice as long, so the files that show
most of this in the least time are chosen, by hand. `make test PYTHON=python3.12` runs them all.
"""

# what is shown -> files below tests/, without `.py`
FILES = {
    "the numbers that decide tokens, and the rules that accept": """
        decode/test_noise decode/test_sampling decode/test_state decode/test_tree
    """,
    "attention, its kernels in interpret mode, and the layers of a policy": """
        decode/test_kernels kernels/test_check models/test_attention models/test_parity
    """,
    "speculative tokens are those of plain decoding, and an engine compiles what it should": """
        engine/test_compiling engine/test_identity engine/test_weights drafts/test_mtp
        train/test_no_recompile
    """,
    "what lies on several devices, and in several processes": """
        parallel/test_distributed parallel/test_reshard parallel/test_sharding
    """,
    "gradients, optimizers and runs that train": """
        train/test_isolation train/test_loss train/test_packing train/test_precision
        train/test_resume
    """,
    "checkpoints, and weights in their formats": """
        checkpoint/test_store weights/test_matrix test_memory
    """,
    "settings of jax: dtypes, and what is logged of programs": """
        test_dtype
    """,
    "the server and the command lines in their own processes": """
        serve/test_openai
    """,
}


def files() -> dict[str, str]:
    """Path below tests/ -> what the file shows."""
    return {f"{name}.py": shown for shown, names in FILES.items() for name in names.split()}
