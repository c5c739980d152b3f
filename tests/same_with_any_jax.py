"""Which test files say nothing of the version of jax, and why.

The whole suite runs once, on Python 3.11 with the first supported jax. The second run, on Python
3.12 with the newest jax, leaves these files out (`SPECJAX_TESTS=jax`, a step of `.ci/run`). It is
there for what a version of jax can change: what programs compute, how they are compiled, placed and
shared out, and jax's own interfaces. A file goes in here when its tests never reach jax, or reach
it only through calls that files which stay make, too.
"""

# reason -> files below tests/, without `.py`
LEFT_OUT = {
    "never reaches jax: pure Python and numpy": """
        bench/test_bench_control bench/test_bench_record bench/test_bench_replay
        bench/test_bench_results
        bench/test_bench_serve bench/test_gpu_check bench/test_gpu_queue
        control/test_bandit control/test_controllers control/test_ema control/test_costs
        control/test_goodput drafts/test_eagle3_config
        engine/test_spelling models/test_families
        serve/test_access_log serve/test_page_words
        test_invariants test_readme test_registry test_tokenizer
        train/test_advantages train/test_config train/test_data train/test_data_paths
        train/test_equivalence train/test_presets train/test_reasoning_gym train/test_reward_forms
        train/test_rewards
        train/test_rules train/test_tasks
    """,
    "benches run the library's own programs, and their figures are made with one version": """
        bench/test_bench_costs bench/test_bench_draft bench/test_bench_rollout
        bench/test_bench_round bench/test_bench_throughput bench/test_bench_train
        bench/test_bench_train_draft bench/test_gpu_parts
    """,
    "the server is HTTP around the engine; serve/test_openai and test_prompt_logprobs stay": """
        serve/test_admin serve/test_clients serve/test_detokenize serve/test_fuzz serve/test_limits
        serve/test_lm_eval serve/test_page serve/test_process serve/test_server_info
        serve/test_text serve/test_token_bytes
    """,
    "command lines, and files of checkpoints, around what other tests call as functions": """
        test_bad_checkpoints test_cli test_cli_convert test_extend test_generation_config
        checkpoint/test_draft_files test_headless_models test_hub
        test_interrupts parallel/test_heartbeat test_verify_cli
        weights/test_gguf weights/test_gguf_real weights/test_gguf_tokenizer weights/test_pickled
    """,
    "rows, messages and logs of runs whose programs train/test_rl compiles, too": """
        train/test_algo train/test_draft_run train/test_lengths train/test_log
        train/test_rl_eagle3 train/test_rl_objectives train/test_scoring train/test_trl_parity
        train/test_turns train/test_watch
    """,
    "settings and choices that pick among programs which test_identity and test_rl run, too": """
        engine/test_control engine/test_exact_mode engine/test_spec_settings
        train/test_groups train/test_partial train/test_rollout_keys train/test_sampling_keys
    """,
    "every setting changes something, in programs that other tests compile, too": """
        settings/test_feature_table settings/test_every_setting
    """,
    "what the host loop keeps and tells, around programs that engine/test_engine runs, too": """
        engine/test_alarm engine/test_chaos engine/test_follow_ups engine/test_news
        engine/test_pages engine/test_rejections engine/test_request_strategy engine/test_stops
        test_telemetry
    """,
    "statistics of accept rules, which decode/ compares with references, and broken rules": """
        engine/test_chi_square engine/test_mutations
    """,
    "heads whose layers, caches and rounds drafts/test_eagle3 and test_every_source run, too": """
        drafts/test_dflash drafts/test_eagle3_parity drafts/test_peagle
    """,
    "kernels of GPUs, whose machines have the jax of the step `middle`, which runs them": """
        kernels/test_flash_gpu kernels/test_triton
    """,
}


def left_out() -> dict[str, str]:
    """Path below tests/ -> why it is left out."""
    return {f"{name}.py": reason for reason, names in LEFT_OUT.items() for name in names.split()}
