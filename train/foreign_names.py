"""Names of settings in verl, TRL and slime, and where they lead in `train.rl`: for messages."""

from __future__ import annotations

_TIMES = (
    "every sample of a step is trained on once, and algo.updates_per_rollout divides the samples "
    "among several updates"
)
_SCALE = "use algo.normalize_std=true or false, and algo.normalize_over=group or batch"
_ESTIMATOR = "use algo=grpo, dr_grpo, dapo, gspo, cispo, rloo or reinforce_pp"
_KL = "set algo.{}, the weight of KL, above 0"

_REWARD = "set reward=module:function"

# What verl has in the sections _OF_VERL, and TRL and slime in none.
_OF_VERL = (
    "algorithm",
    "actor_rollout_ref.actor",
    "actor_rollout_ref.actor.policy_loss",
    "actor_rollout_ref.rollout",
)
_OF_ALGO = {
    "advantage_estimator": _ESTIMATOR,
    "disable_grpo_std_normalization": "set algo.normalize_std=false",
    "eps_clip": "algo.clip_ratio",
    "eps_clip_high": "algo.clip_ratio_high",
    "eps_clip_c": "algo.clip_ratio_c",
    "entropy_coef": "algo.entropy_coeff",
    "use_tis": "algo.tis",
    "tis_clip": "algo.tis_cap",
    "rollout_is": "algo.tis",
    "rollout_is_threshold": "algo.tis_cap",
    "rollout_correction.rollout_is": "algo.tis",
    "rollout_correction.rollout_is_threshold": "algo.tis_cap",
    "dynamic_sampling_filter_path": "algo.dynamic_sampling",
    "over_sampling_batch_size": "algo.max_num_gen_batches says how many groups a step may try",
    "loss_mode": "algo.objective",
    "loss_type": f"{_ESTIMATOR}, or algo.loss_aggregation",
    "loss_agg_mode": "algo.loss_aggregation",
    "adv_estimator": _ESTIMATOR,
    "beta": "algo.kl_loss_coef",
    "use_kl_loss": _KL.format("kl_loss_coef"),
    "use_kl_in_reward": _KL.format("kl_coef"),
    "kl_ctrl": "algo.kl_coef",
    "kl_ctrl.kl_coef": "algo.kl_coef",
    "sync_ref_model": "set algo.ref_update_steps above 0",
    "ref_model_sync_steps": "algo.ref_update_steps",
    "epsilon": "algo.clip_ratio",
    "epsilon_high": "algo.clip_ratio_high",
    "clip_ratio_low": "algo.clip_ratio",
    "delta": "algo.clip_ratio_c",
    "scale_rewards": _SCALE,
    "norm_adv_by_std_in_grpo": "algo.normalize_std",
    "num_iterations": _TIMES,
    "ppo_epochs": _TIMES,
    "ppo_mini_batch_size": "algo.updates_per_rollout says how many updates a step has",
    "steps_per_generation": "algo.updates_per_rollout",
    "mask_truncated_completions": "algo.mask_truncated",
    "filter_groups.enable": "algo.dynamic_sampling",
    "filter_groups.max_num_gen_batches": "algo.max_num_gen_batches",
    "overlong_buffer": "set algo.overlong_buffer_len and algo.overlong_penalty_factor",
    "tis_imp_ratio_cap": "algo.tis_cap",
    "vllm_importance_sampling_correction": "algo.tis",
    "vllm_importance_sampling_cap": "algo.tis_cap",
}

FOREIGN_NAMES = {
    **_OF_ALGO,
    **{f"{name}.{own}": _OF_ALGO[own] for own in _OF_ALGO for name in ("algo", *_OF_VERL)},
    # Names that are the same here, in another section.
    **{f"{_OF_VERL[0]}.{own}": f"algo.{own}" for own in ("kl_penalty", "filter_groups.metric")},
    **{
        f"{_OF_VERL[1]}.{own}": f"algo.{own}"
        for own in (
            "clip_ratio",
            "clip_ratio_high",
            "clip_ratio_c",
            "entropy_coeff",
            "kl_loss_coef",
            "kl_loss_type",
        )
    },
    **{f"{_OF_VERL[3]}.{own}": f"rollout.{own}" for own in ("n", "temperature", "top_p", "top_k")},
    "actor_rollout_ref.actor.optim.lr": "optim.lr",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "optim.warmup_steps",
    "actor_rollout_ref.actor.optim.weight_decay": "optim.weight_decay",
    "actor_rollout_ref.actor.grad_clip": "optim.clip_norm",
    "actor_rollout_ref.model.path": "model",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "rollout.tp",
    "actor_rollout_ref.rollout.prompt_length": "rollout.max_prompt_tokens",
    "actor_rollout_ref.rollout.response_length": "rollout.max_tokens",
    "actor_rollout_ref.rollout.val_kwargs": "set n, temperature, top_k or top_p of eval.sets.NAME",
    **{
        f"{section}.{own}": here
        for section in (
            "reward_model.overlong_buffer",
            "reward_model.reward_kwargs.overlong_buffer_cfg",
        )
        for own, here in {
            "enable": "set algo.overlong_buffer_len above 0",
            "len": "algo.overlong_buffer_len",
            "penalty_factor": "algo.overlong_penalty_factor",
        }.items()
    },
    "custom_reward_function.path": _REWARD,
    "custom_reward_function.name": _REWARD,
    "custom_rm_path": _REWARD,
    "rm_type": "reward",
    "hf_checkpoint": "model",
    "prompt_data": "data.path",
    "apply_chat_template": "data.chat",
    "num_rollout": "steps",
    "n_samples_per_prompt": "rollout.n",
    "rollout_batch_size": "rollout.prompts",
    "rollout_max_prompt_len": "rollout.max_prompt_tokens",
    "rollout_max_response_len": "rollout.max_tokens",
    "rollout_temperature": "rollout.temperature",
    "rollout_top_p": "rollout.top_p",
    "lr": "optim.lr",
    "learning_rate": "optim.lr",
    "max_steps": "steps",
    "max_grad_norm": "optim.clip_norm",
    "clip_grad": "optim.clip_norm",
    "trainer.total_training_steps": "steps",
    "trainer.save_freq": "checkpoint.every",
    "save_interval": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "algo.importance_sampling_level": "use algo=gspo, which has algo.importance_sampling_level",
    "importance_sampling_level": "use algo=gspo, which has algo.importance_sampling_level",
    "data.train_files": "data.path",
    "data.val_files": "set eval.sets.NAME.path, or data.heldout_path for the one held-out set",
    "data.drop_duplicates": "data.duplicates",
    "data.filter_overlong_prompts": "data.overlong_prompts",
    "data.apply_chat_template_kwargs": "data.chat_template_kwargs",
    "data.train_batch_size": "rollout.prompts",
    "data.max_prompt_length": "rollout.max_prompt_tokens",
    "data.max_response_length": "rollout.max_tokens",
    "data.filter_accuracy": "algo.dynamic_sampling",
    "data.accuracy_lower_bound": "algo.filter_groups.min",
    "data.accuracy_upper_bound": "algo.filter_groups.max",
    "num_generations": "rollout.n",
    "max_prompt_length": "rollout.max_prompt_tokens",
    "max_completion_length": "rollout.max_tokens",
    "trainer.test_freq": "eval.every",
    "trainer.val_before_train": "eval.before",
    "eval_interval": "eval.every",
    "eval_steps": "eval.every",
    "eval_prompt_data": "set eval.sets.NAME.path",
    "n_samples_per_eval_prompt": "set eval.sets.NAME.n",
    "eval_max_response_len": "set eval.sets.NAME.max_tokens",
    "rollout.val_kwargs": "set n, temperature, top_k or top_p of eval.sets.NAME",
    "reward_funcs": "reward",
    "reward_weights": "rewards.weights",
}
