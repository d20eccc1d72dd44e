"""The configuration of a run: one closed tree, read from YAML and overridden by ``--dotted.key value``.

Nothing heavy is imported here, so that a wrong key is reported before Ray, torch or vLLM load.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsConfigDict, SettingsError

from actors.config import BufferConfig, EnvironmentConfig, GeneratorConfig, Section
from serve.config import PolicyConfig
from train.data.sampler import TaskMix

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"


class ConfigError(ValueError):
    """A configuration that cannot be used, in one line."""


class OptimizerConfig(Section):
    """AdamW."""

    lr: float = Field(1e-6, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    warmup_steps: int = Field(0, ge=0)


class ModelConfig(Section):
    path: str = Field("Qwen/Qwen2.5-1.5B-Instruct", description="a Hugging Face folder or name")


class PolicyTrainingConfig(Section):
    """The policy as the learner sees it."""

    model: ModelConfig = ModelConfig()
    optimizer_config: OptimizerConfig = OptimizerConfig()
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    gradient_checkpointing: bool = False


class AlgorithmConfig(Section):
    """Advantages and loss."""

    advantage_estimator: Literal["grpo", "dr_grpo", "rloo", "reinforce++"] = "grpo"
    loss: Literal["ppo_clip", "cispo", "gspo", "decoupled"] = "ppo_clip"
    eps_clip_low: float = Field(0.2, ge=0)
    eps_clip_high: float = Field(0.28, ge=0)
    dual_clip: float | None = Field(None, gt=1, description="bounds the loss of negative advantages; 3 is usual")
    use_kl_loss: bool = False
    kl_loss_coef: float = Field(0.001, ge=0)
    overlong_filtering: bool = Field(
        True, description="episodes cut at a token limit are neither trained on nor part of the group's baseline"
    )
    shuffle_rewards: bool = Field(
        False, description="a control: rewards are permuted over the batch, so that there is nothing to learn"
    )


class LearnerConfig(Section):
    """The learner's processes."""

    num_workers: int = Field(1, ge=1, description="ranks")
    use_gpu: bool = True
    num_cpus: float = Field(1.0, ge=0, description="logical CPUs of a rank")
    num_threads: int = Field(1, ge=1, description="OpenMP threads of a rank")
    num_gpus: float = Field(1.0, gt=0, description="GPUs of a rank; less than 1 shares one with replicas of the policy")
    zero_stage: Literal[1, 2, 3] = Field(2, description="DeepSpeed ZeRO stage")
    tokens_per_microbatch: int = Field(16_384, ge=1)
    start_timeout: float = Field(600.0, gt=0, description="seconds until all ranks are up")
    publish_timeout: float = Field(300.0, gt=0, description="seconds one weight update may take on all replicas")


class TrainerConfig(Section):
    """The training loop."""

    policy: PolicyTrainingConfig = PolicyTrainingConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    learner: LearnerConfig = LearnerConfig()
    train_batch_size: int = Field(4, ge=1, description="groups of a step")
    epochs: int = Field(20, ge=1, description="passes over the training tasks")
    max_steps: int | None = Field(None, ge=1, description="stop after this many steps, whatever the epochs say")
    ckpt_interval: int = Field(10, ge=1, description="steps between checkpoints; the last step always writes one")
    max_ckpts_to_keep: int = Field(2, ge=1)
    dump_trajectories: bool = Field(
        False, description="keep every training batch and evaluation, token by token, in run_dir/trajectories"
    )
    eval_interval: int | None = Field(
        None, ge=1, description="steps between evaluations beside training, which goes on; default: none"
    )
    eval_before_train: bool = True
    eval_after_train: bool = True


class DataConfig(Section):
    """Tasks: files in Fleet's format, or folders that ``fleet-rl prepare`` wrote."""

    train_tasks: Path = Field(description="a task file, JSON or Parquet, or a prepared folder: its train.parquet")
    eval_tasks: Path | None = Field(
        None,
        description="held-out tasks: a file, or a prepared folder: its validation.parquet; default: that of the folder "
        "in train_tasks, or a share of the file there",
    )
    eval_ratio: float = Field(0.1, gt=0, lt=1, description="share held out of a file in train_tasks without eval_tasks")
    max_tasks: int | None = Field(None, ge=1, description="at most this many training tasks")
    max_eval_tasks: int | None = Field(None, ge=1, description="at most this many held-out tasks")
    mix: TaskMix = TaskMix()


class TrajectoriesConfig(Section):
    """How trajectories are kept, where ``trainer.dump_trajectories`` is set."""

    jsonl: bool = Field(True, description="write lines of JSON beside each Parquet file; large runs can do without")
    upload_to: str | None = Field(
        None,
        pattern=r"^s3://[^/]+",
        description="folder in S3; a run's files go to UPLOAD_TO/NAME/trajectories and UPLOAD_TO/evals/NAME",
    )


class DebugConfig(Section):
    """Half of a run alone."""

    rollout_only: bool = Field(
        False, description="roll out and keep trainer.max_steps batches; no learner is started, the weights stay"
    )
    train_only: str | None = Field(
        None,
        min_length=1,
        description="train once on each batch that this run has kept: its folder or name, or these in S3 (s3://...); "
        "no policy and no environment is started, and nothing is evaluated",
    )


class TrackingConfig(Section):
    """Where metrics go. ``metrics.jsonl`` is always written."""

    tensorboard: bool = True
    wandb: bool = Field(True, description="offline without WANDB_API_KEY")
    project: str = "fleet-task-grpo"


class RunConfig(Section):
    """Everything a run is told."""

    name: str = Field(pattern=NAME_PATTERN, description="the run's name; its folder is output_dir/name")
    seed: int = Field(0, ge=0)
    output_dir: Path = Path("runs")
    object_store_bytes: int = Field(
        512 * 2**20, ge=80 * 2**20, description="size of Ray's object store, where the run starts Ray itself"
    )
    cluster_timeout: float = Field(
        1800.0,
        gt=0,
        description="seconds that a run waits for room in the cluster at RAY_ADDRESS: for nodes that still join it, or "
        "for what others use",
    )
    overwrite: bool = Field(False, description="replace the folder of an ended run with the same name")
    resume: bool = Field(
        False,
        description="go on from the last complete checkpoint of the run with this name, if there is one",
    )
    max_restarts: int = Field(
        3,
        ge=0,
        description="times in a row, without a new step, that a run which failed goes on by itself: from its last "
        "checkpoint, or anew if it has none yet",
    )
    run_timeout: float = Field(7 * 86400.0, gt=0, description="seconds after which the run is ended")
    trainer: TrainerConfig = TrainerConfig()
    generator: GeneratorConfig = GeneratorConfig()
    policy: PolicyConfig = PolicyConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    buffer: BufferConfig = BufferConfig()
    data: DataConfig
    trajectories: TrajectoriesConfig = TrajectoriesConfig()
    tracking: TrackingConfig = TrackingConfig()
    debug: DebugConfig = DebugConfig()

    @property
    def run_dir(self) -> Path:
        return self.output_dir / self.name

    @model_validator(mode="after")
    def _halves_fit(self) -> RunConfig:
        if not self.debug.rollout_only:
            return self
        if self.debug.train_only is not None:
            raise ValueError("debug.rollout_only and debug.train_only are two halves of a run: set one of them")
        if not self.trainer.dump_trajectories:
            raise ValueError("debug.rollout_only is set but trainer.dump_trajectories is not: nothing would be kept")
        if self.resume:
            raise ValueError("debug.rollout_only writes no checkpoint that resume could go on from: set one of them")
        return self

    @model_validator(mode="after")
    def _sizes_fit(self) -> RunConfig:
        generator, trainer = self.generator, self.trainer
        if generator.max_inflight_episodes < generator.n_samples_per_prompt:
            raise ValueError(
                f"generator.max_inflight_episodes {generator.max_inflight_episodes} holds no group of "
                f"generator.n_samples_per_prompt {generator.n_samples_per_prompt}"
            )
        if self.policy.eval_replicas and trainer.eval_interval is None:
            raise ValueError("policy.eval_replicas is set but trainer.eval_interval is not: they would do nothing")
        beside, most = generator.eval_episodes_beside_training, generator.max_inflight_episodes
        if trainer.eval_interval and not generator.eval_n_samples_per_prompt <= beside <= most:
            raise ValueError(
                f"generator.eval_max_inflight_episodes {beside} must hold generator.eval_n_samples_per_prompt "
                f"{generator.eval_n_samples_per_prompt} and lie within generator.max_inflight_episodes {most}"
            )
        if self.buffer.window is not None and self.buffer.window < trainer.train_batch_size:
            raise ValueError(
                f"buffer.window {self.buffer.window} never holds a batch of trainer.train_batch_size "
                f"{trainer.train_batch_size} groups: make it at least as large"
            )
        if generator.max_input_length >= self.policy.max_model_len:
            raise ValueError(
                f"generator.max_input_length {generator.max_input_length} leaves no room to sample in "
                f"policy.max_model_len {self.policy.max_model_len}"
            )
        if self.trajectories.upload_to and not trainer.dump_trajectories:
            raise ValueError("trajectories.upload_to is set but trainer.dump_trajectories is not: nothing is kept")
        if trainer.algorithm.use_kl_loss and trainer.algorithm.kl_loss_coef == 0:
            raise ValueError("trainer.algorithm.use_kl_loss is set but kl_loss_coef is 0")
        if generator.sampling_params.temperature == 0:
            raise ValueError("generator.sampling_params.temperature 0 samples one trajectory n times: nothing to learn")
        # Corrections for top-p and top-k need the engine's own normaliser, so the learner could not match its logprobs.
        if generator.sampling_params.top_p < 1 or generator.sampling_params.top_k not in (-1, 0):
            raise ValueError("generator.sampling_params.top_p and top_k must be 1 and -1 for training")
        return self


class _CommandLine(BaseSettings, RunConfig):
    """RunConfig with overrides from the command line.

    Environment variables are no source: a stray NAME must not count.
    """

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        cli_prog_name="python -m train.run CONFIG",
        cli_exit_on_error=False,
        cli_avoid_json=True,
        cli_hide_none_type=True,
    )

    @classmethod
    def settings_customise_sources(cls, settings_cls, init_settings, **_):
        return (init_settings,)


def load_config(path: Path, overrides: list[str]) -> RunConfig:
    """Read ``path`` and apply ``--dotted.key value`` pairs. ``--help`` among them prints every key and exits.

    Raises:
        ConfigError: one line that names the key and, for an unknown one, the nearest known key.
    """
    raw = read_yaml(path)
    for argument in overrides:
        key = argument[2:].partition("=")[0]
        if argument.startswith("--") and key != "help" and key not in known_keys():
            raise ConfigError(unknown_key(key))
    try:
        source = CliSettingsSource(_CommandLine, cli_parse_args=overrides)
        merged = _CommandLine(_cli_settings_source=source, **raw)
        return RunConfig.model_validate(merged.model_dump())
    except ValidationError as error:
        raise ConfigError(f"{path}: {describe(error)}") from None
    except SettingsError as error:
        raise ConfigError(" ".join(str(error).split())) from None


def print_help() -> None:
    """Print every key of the configuration with its type, meaning and default."""
    CliSettingsSource(_CommandLine, cli_parse_args=False).root_parser.print_help()


def read_yaml(path: Path) -> dict[str, Any]:
    """The keys of a configuration file.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"configuration file {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"configuration file {path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict) or not all(isinstance(key, str) for key in raw):
        raise ConfigError(f"configuration file {path} must hold a mapping of keys")
    return raw


def describe(error: ValidationError, model: type[BaseModel] = RunConfig) -> str:
    """The first problem of a validation error of ``model``, in one line."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "extra_forbidden":
        return unknown_key(where, model) + more
    message = first["msg"].removeprefix("Value error, ")
    if not where:
        return message + more
    got = f", got {first['input']!r}" if first["type"] != "missing" else ""
    return f"'{where}': {message[:1].lower()}{message[1:]}{got}"[:400] + more


def known_keys(model: type[BaseModel] = RunConfig, prefix: str = "") -> list[str]:
    """Every dotted key of the configuration, sections included."""
    keys: list[str] = []
    for name, info in model.model_fields.items():
        keys.append(prefix + name)
        section = section_of(info)
        if section is not None:
            keys += known_keys(section, f"{prefix}{name}.")
    return keys


def section_of(info: FieldInfo) -> type[BaseModel] | None:
    """The section that a field holds, be it optional or not; ``None``: it holds a value."""
    kinds = get_args(info.annotation) or (info.annotation,)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def unknown_key(key: str, model: type[BaseModel] = RunConfig) -> str:
    """What to say of a key that ``model`` does not have."""
    nearest = difflib.get_close_matches(key, known_keys(model), n=1, cutoff=0.0)
    return f"unknown key '{key}'; the nearest known key is '{nearest[0]}'"
