"""Maps the names that TRL, verl and similar systems give to settings to the keys of a recipe.

A recipe with one of these names is refused, as it is for any other unknown key, and the message names the key
of the setting in AstraFlow. `*` stands for the name of a policy.
"""

__all__ = ["SYNONYMS"]

_BATCH = "policies.*.table.groups_per_batch"
_BUDGET = "policies.*.train.token_budget"
_CONTEXT = "rollout.engine.max_context"
_KL = "policies.*.train.auxiliary.kl.coef"
_GROUP = "policies.*.table.group_size"
_LORA = "policies.*.train.backend.lora"
_LOSS = "policies.*.train.loss"
_NORM = "policies.*.train.optimizer.max_grad_norm"
_STEPS = "policies.*.train.steps"
_TOKENS = "policies.*.sampling.max_tokens"

_IN_GROUPS = "counted in groups, each of group_size episodes"
_IN_BATCHES = "counted in batches, not in passes over the tasks"
_BY_TOKENS = "microbatches are cut by tokens"
_PASSED_ON = "as an argument of the server's command"

SYNONYMS: dict[str, tuple[str, str]] = {
    # --- optimizer and schedule
    "learning_rate": ("policies.*.train.lr", ""),
    "actor_lr": ("policies.*.train.lr", ""),
    "lr_scheduler": ("policies.*.train.optimizer.schedule", ""),
    "lr_scheduler_type": ("policies.*.train.optimizer.schedule", ""),
    "scheduler": ("policies.*.train.optimizer.schedule", ""),
    "lr_warmup_steps": ("policies.*.train.optimizer.warmup_steps", ""),
    "warmup": ("policies.*.train.optimizer.warmup_steps", ""),
    "warmup_ratio": ("policies.*.train.optimizer.warmup_steps", "a number of steps"),
    "optim": ("policies.*.train.optimizer", ""),
    "adam_beta1": ("policies.*.train.optimizer.betas", ""),
    "adam_beta2": ("policies.*.train.optimizer.betas", ""),
    "adam_epsilon": ("policies.*.train.optimizer.eps", ""),
    "clip_grad": (_NORM, ""),
    "grad_clip": (_NORM, ""),
    "gradient_clipping": (_NORM, ""),
    "max_norm": (_NORM, ""),
    # --- sizes and lengths of a run
    "batch_size": (_BATCH, _IN_GROUPS),
    "train_batch_size": (_BATCH, _IN_GROUPS),
    "rollout_batch_size": (_BATCH, _IN_GROUPS),
    "generation_batch_size": (_BATCH, _IN_GROUPS),
    "per_device_train_batch_size": (_BUDGET, _BY_TOKENS),
    "micro_batch_size": (_BUDGET, _BY_TOKENS),
    "ppo_micro_batch_size_per_gpu": (_BUDGET, _BY_TOKENS),
    "ppo_max_token_len_per_gpu": (_BUDGET, ""),
    "gradient_accumulation_steps": (_BUDGET, _BY_TOKENS),
    "ppo_mini_batch_size": ("policies.*.train.minibatches", "their number per batch"),
    "mini_batch_size": ("policies.*.train.minibatches", "their number per batch"),
    "ppo_epochs": ("policies.*.train.minibatches", "a batch is seen once, in so many optimizer steps"),
    "num_iterations": ("policies.*.train.minibatches", "a batch is seen once, in so many optimizer steps"),
    "num_generations": (_GROUP, "episodes per task"),
    "num_samples": (_GROUP, "episodes per task"),
    "n_samples_per_prompt": (_GROUP, "episodes per task"),
    "rollout_n": (_GROUP, "episodes per task"),
    "n": (_GROUP, "episodes per task"),
    "max_steps": (_STEPS, _IN_BATCHES),
    "num_steps": (_STEPS, _IN_BATCHES),
    "total_steps": (_STEPS, _IN_BATCHES),
    "total_training_steps": (_STEPS, _IN_BATCHES),
    "epochs": (_STEPS, _IN_BATCHES),
    "num_epochs": (_STEPS, _IN_BATCHES),
    "num_train_epochs": (_STEPS, _IN_BATCHES),
    "total_epochs": (_STEPS, _IN_BATCHES),
    "save_steps": ("policies.*.train.checkpoint_every", ""),
    "save_freq": ("policies.*.train.checkpoint_every", ""),
    "save_total_limit": ("policies.*.train.keep_checkpoints", ""),
    # --- sampling
    "max_new_tokens": (_TOKENS, ""),
    "max_completion_length": (_TOKENS, ""),
    "max_response_length": (_TOKENS, ""),
    "response_length": (_TOKENS, ""),
    "max_prompt_length": (_CONTEXT, "prompt and completion together"),
    "max_length": (_CONTEXT, "prompt and completion together"),
    "max_seq_length": (_CONTEXT, "prompt and completion together"),
    "max_model_len": (_CONTEXT, "prompt and completion together"),
    "stop_sequences": ("policies.*.sampling.stop", ""),
    "stop_strings": ("policies.*.sampling.stop", ""),
    # --- loss
    "beta": (_KL, ""),
    "kl_beta": (_KL, ""),
    "kl_coef": (_KL, ""),
    "kl_loss_coef": (_KL, ""),
    "init_kl_coef": (_KL, ""),
    "kl_penalty": ("policies.*.train.auxiliary.kl.estimator", ""),
    "kl_loss_type": ("policies.*.train.auxiliary.kl.estimator", ""),
    "use_kl_in_reward": ("policies.*.train.auxiliary.kl.place", ""),
    "epsilon": (f"{_LOSS}.clip_low", "and clip_high"),
    "clip_ratio": (f"{_LOSS}.clip_low", "and clip_high"),
    "clip_range": (f"{_LOSS}.clip_low", "and clip_high"),
    "cliprange": (f"{_LOSS}.clip_low", "and clip_high"),
    "clip_eps": (f"{_LOSS}.clip_low", "and clip_high"),
    "epsilon_low": (f"{_LOSS}.clip_low", ""),
    "clip_ratio_low": (f"{_LOSS}.clip_low", ""),
    "epsilon_high": (f"{_LOSS}.clip_high", ""),
    "clip_ratio_high": (f"{_LOSS}.clip_high", ""),
    "clip_ratio_c": (f"{_LOSS}.dual_clip", ""),
    "algorithm": (_LOSS, ""),
    "loss_type": (_LOSS, ""),
    "policy_loss": (_LOSS, ""),
    "loss_agg_mode": ("policies.*.train.denominator", ""),
    "adv_estimator": ("policies.*.table.credit", ""),
    "advantage": ("policies.*.table.credit", ""),
    "advantage_estimator": ("policies.*.table.credit", ""),
    "norm_adv_by_std_in_grpo": ("policies.*.table.credit", ""),
    "scale_rewards": ("policies.*.table.credit", ""),
    "whiten_rewards": ("policies.*.table.normalize", ""),
    "entropy_coeff": ("policies.*.train.auxiliary.entropy_coef", ""),
    "ent_coef": ("policies.*.train.auxiliary.entropy_coef", ""),
    "gamma": ("policies.*.train.auxiliary.critic.discount", ""),
    "lam": ("policies.*.train.auxiliary.critic.decay", ""),
    "tis_imp_ratio_cap": ("policies.*.train.auxiliary.correction.max_weight", ""),
    "filter_groups": ("policies.*.table.filters", ""),
    "dynamic_sampling": ("policies.*.table.filters", "zero_variance"),
    "staleness": ("policies.*.table.max_staleness", ""),
    "staleness_threshold": ("policies.*.table.max_staleness", ""),
    # --- models
    "model_name": ("policies.*.model", ""),
    "model_name_or_path": ("policies.*.model", ""),
    "model_path": ("policies.*.model", ""),
    "base_model": ("policies.*.model", ""),
    "ref_model": ("policies.*.train.auxiliary.reference", ""),
    "reference_model": ("policies.*.train.auxiliary.reference", ""),
    "lora_rank": (f"{_LORA}.rank", ""),
    "lora_r": (f"{_LORA}.rank", ""),
    "lora_alpha": (f"{_LORA}.alpha", ""),
    "target_modules": (f"{_LORA}.targets", ""),
    "peft_config": (_LORA, ""),
    "peft": (_LORA, ""),
    "bf16": ("policies.*.train.backend.dtype", ""),
    "torch_dtype": ("policies.*.train.backend.dtype", ""),
    "mixed_precision": ("policies.*.train.backend.dtype", ""),
    # --- data, rewards, evaluation
    "dataset": ("tasks.sources", ""),
    "datasets": ("tasks.sources", ""),
    "dataset_name": ("tasks.sources", ""),
    "train_dataset": ("tasks.sources", ""),
    "train_files": ("tasks.sources", ""),
    "reward_fn": ("tasks.reward", ""),
    "reward_func": ("tasks.reward", ""),
    "reward_funcs": ("tasks.reward", ""),
    "reward_function": ("tasks.reward", ""),
    "reward_model": ("tasks.reward", ""),
    "rewards": ("tasks.reward", ""),
    "custom_reward_function": ("tasks.reward", ""),
    "eval_dataset": ("eval.sets", ""),
    "val_files": ("eval.sets", ""),
    "eval_steps": ("eval.every", ""),
    "eval_every": ("eval.every", ""),
    "test_freq": ("eval.every", ""),
    "environment": ("tasks.environments", ""),
    "env": ("tasks.environments", ""),
    # --- generation
    "inference_engine": ("rollout.engine", ""),
    "rollout_backend": ("rollout.engine", ""),
    "use_vllm": ("rollout.engine", "{name: vllm}"),
    "vllm": ("rollout.engine", "{name: vllm}"),
    "sglang": ("rollout.engine", "{name: sglang}"),
    "gpu_memory_utilization": ("rollout.engine.args", _PASSED_ON),
    "tensor_parallel_size": ("rollout.engine.args", _PASSED_ON),
    "tensor_model_parallel_size": ("rollout.engine.args", _PASSED_ON),
    "max_num_seqs": ("rollout.engine.num_slots", ""),
    "num_workers": ("rollout.services", ""),
    "num_rollout_workers": ("rollout.services", ""),
}
"""The other system's name -> AstraFlow's dotted key, and what users must know about the difference."""
