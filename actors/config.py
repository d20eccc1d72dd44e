"""Configuration of what produces trajectories: sampling, episodes, environments and the replay buffer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

# OpenEnv servers a run starts itself: the program of each.
LOCAL_OPENENV = {"local:browse": "actors.envs.browse"}
VARIABLE = re.compile(r"\$\{(\w+)\}")  # an environment variable in a header's value


class Section(BaseModel):
    """A closed section of the configuration: an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class SamplingConfig(Section):
    """How tokens are drawn."""

    temperature: float = Field(1.0, ge=0.0, le=2.0, description="0 is greedy")
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(-1, ge=-1, description="-1: no limit")
    max_generate_length: int = Field(8192, ge=1, description="tokens of one turn")
    stop: tuple[str, ...] = Field((), description='stop strings, for example ["</tool_call>"]')


class DeadlinesConfig(Section):
    """Seconds each phase of an episode may take before the episode ends with a reason."""

    provision: float = Field(300.0, gt=0, description="wait for an instance, the queue at the quota included")
    reset: float = Field(60.0, gt=0, description="reset of the instance")
    list: float = Field(30.0, gt=0, description="connecting to the instance's tools and listing them")
    generate: float = Field(600.0, gt=0, description="one turn of the policy")
    step: float = Field(90.0, gt=0, description="one tool call; passing it is an error the policy reads")
    verify: float = Field(120.0, gt=0, description="grading, its retries included")
    close: float = Field(30.0, gt=0, description="giving the instance back")
    episode: float = Field(1800.0, gt=0, description="everything from reset to the last turn")

    @property
    def begin(self) -> float:
        """Until the policy can take its first turn, in seconds."""
        return self.reset + self.list

    @property
    def budget(self) -> float:
        """The longest an instance can be held, in seconds."""
        return self.begin + self.episode + self.verify + self.close

    @property
    def group(self) -> float:
        """The longest a group may take, in seconds: its episodes run side by side."""
        return self.provision + self.budget + 30.0


class GeneratorConfig(Section):
    """Episodes: how many, how long, and how they are sampled."""

    n_samples_per_prompt: int = Field(4, ge=2, description="trajectories of a group")
    eval_n_samples_per_prompt: int = Field(3, ge=1, description="attempts at a task in evaluation")
    max_turns: int = Field(50, ge=1)
    max_input_length: int = Field(48_000, ge=1, description="an episode with more token ids takes no further turn")
    sampling_params: SamplingConfig = SamplingConfig()
    eval_greedy: bool = Field(True, description="evaluate greedily as well as with sampling_params")
    tools_channel: Literal["text", "template"] = Field(
        "text", description="tool schemas in the system text, or through the chat template's tools="
    )
    tool_call_format: str = Field(
        "tags",
        description="how the policy writes a call: tags (<tool_call> and JSON), or the name of a vLLM tool parser "
        "(hermes, llama3_json, qwen3_coder, glm47, ...) for a model family's own format",
    )
    multiple_tool_calls: Literal["first", "all", "error"] = Field(
        "first", description="several calls in one turn: carry out the first, all in order, or none and say so"
    )
    max_output_chars: int = Field(20_000, ge=100, description="of a tool's output; what is beyond is cut, with a note")
    context_tools: bool = Field(False, description="tools by which the policy manages its own context")
    inject_context_status: bool = Field(False, description="tokens and turns used, at the end of every observation")
    chat_template_kwargs: dict[str, Any] = Field({}, description="passed to the chat template")
    num_workers: int = Field(1, ge=1, description="RolloutWorker actors")
    worker_num_cpus: float = Field(1.0, ge=0, description="logical CPUs of a RolloutWorker")
    worker_timeout: float = Field(
        60.0, gt=0, description="seconds without a sign of life after which a RolloutWorker is killed and started again"
    )
    max_inflight_episodes: int = Field(768, ge=1, description="episodes running at once, over all workers")
    eval_max_inflight_episodes: int | None = Field(
        None,
        ge=1,
        description="of these, at most so many of an evaluation beside training (trainer.eval_interval); default: a "
        "quarter",
    )
    deadlines: DeadlinesConfig = DeadlinesConfig()

    @property
    def eval_episodes_beside_training(self) -> int:
        """Episodes of an evaluation that run at once while training goes on."""
        return self.eval_max_inflight_episodes or max(self.max_inflight_episodes // 4, self.eval_n_samples_per_prompt)


class EnvironmentConfig(Section):
    """Where environments come from: Fleet, and OpenEnv servers for the tasks whose ``env_key`` is named here."""

    fleet: Literal["local", "hosted"] = Field("hosted", description="the embedded local Fleet, or the Fleet service")
    base_url: str | None = Field(None, description="another control plane; default: FLEET_BASE_URL or the SDK's own")
    local_faults: Path | None = Field(None, description="fault file for the local Fleet")
    local_applications: tuple[str, ...] = Field(
        (), description="applications of your own, MODULE:ATTRIBUTE, for the local Fleet to host beside the sample ones"
    )
    max_instances: int | None = Field(None, ge=1, description="at most this many; default: the account's limit")
    ttl_margin: float = Field(60.0, ge=0, description="seconds an instance outlives the longest episode")
    heartbeat_interval: float = Field(60.0, ge=1, description="seconds between heartbeats of a leased instance")
    partial_reward: bool = Field(
        False, description="a grade of 0 becomes the share of what the verifier printed as right, where it did"
    )
    openenv: dict[str, str] = Field(
        {}, description="OpenEnv servers: env_key to URL, or to local:browse, which the run starts and ends itself"
    )
    openenv_headers: dict[str, dict[str, str]] = Field(
        {}, description="HTTP headers for these servers, by env_key; ${NAME} in a value is an environment variable"
    )
    openenv_max_sessions: int = Field(
        32, ge=1, description="episodes a RolloutWorker has at once on one OpenEnv server; others wait"
    )

    @field_validator("openenv")
    @classmethod
    def _reachable(cls, servers: dict[str, str]) -> dict[str, str]:
        for env_key, url in servers.items():
            if url not in LOCAL_OPENENV and not re.match(r"(https?|wss?)://[^/]", url):
                raise ValueError(f"'{env_key}' must be an http, https, ws or wss URL, or {' or '.join(LOCAL_OPENENV)}")
        return servers

    def secret_headers(self, variables: Mapping[str, str]) -> dict[str, dict[str, str]]:
        """``openenv_headers`` with the variables put in. Not for files: the configuration keeps the names.

        Raises:
            ValueError: a variable is not set, or a header cannot be sent.
        """
        return {
            env_key: {name: _header(env_key, name, value, variables) for name, value in headers.items()}
            for env_key, headers in self.openenv_headers.items()
        }


def _header(env_key: str, name: str, value: str, variables: Mapping[str, str]) -> str:
    missing = [each for each in VARIABLE.findall(value) if each not in variables]
    if missing:
        raise ValueError(f"'{env_key}', header {name}: the environment variable {missing[0]} is not set")
    sent = VARIABLE.sub(lambda found: variables[found[1]], value)
    if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name) or not re.fullmatch(r"[\x20-\x7e\t]*", sent):
        raise ValueError(f"'{env_key}', header {name}: its name or value holds what no HTTP header may")
    return sent


class BufferConfig(Section):
    """The replay buffer between rollouts and the learner."""

    max_staleness: int = Field(4, ge=0, description="policy versions a trained group may lag; 0: synchronous")
    max_bytes: int = Field(4 * 2**30, ge=1, description="bytes of buffered trajectories")
    zero_variance_groups: Literal["count", "resample"] = Field(
        "count",
        description="groups whose rewards are all equal: count towards the batch without being trained on, "
        "or are replaced by further groups",
    )
    window: int | None = Field(
        None,
        ge=1,
        description="a batch is taken from this many of the oldest groups, unfinished ones included; train_batch_size: "
        "strictly in the order they were started; default: the oldest of those that are ready",
    )
    batch_deadline: float = Field(1800.0, gt=0, description="seconds the learner waits for a batch")
