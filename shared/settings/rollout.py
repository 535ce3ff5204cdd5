"""How completions are drawn, and by what: ``[sampling]``, ``[rollout]``, ``[rollout.vllm]``, ``[episodes]``."""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from penstock.shared.settings.section import Count, OptionalPath, Section

_OBJECT = r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"
_HERE = re.compile(r"localhost$|127\.|::1$", re.IGNORECASE)

MOST_KEPT = 256
"""Most tokens that a truncated distribution keeps at a position, besides ties with the last: their ids travel."""

LEAST_TEMPERATURE = 0.01
"""vLLM draws at this temperature if one above 0 is lower."""


class SamplingSettings(Section):
    """How completions are drawn (docs/algorithms.md, "Truncated sampling")."""

    group_size: Annotated[int, Field(ge=2, le=4096)] = Field(default=16)
    """Completions per prompt, 2 to 4096. During the run it may grow to 4 times the file's value, and slots × group_size
    to 16 times."""
    max_new_tokens: PositiveInt = Field(default=256)
    """Maximum length of a completion, in tokens."""
    temperature: Annotated[float, Field(ge=LEAST_TEMPERATURE)] = Field(default=1.0)
    """Softmax temperature, at least 0.01. The trainer divides its logits by the same number."""
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(default=1.0)
    """Draw from the most probable tokens whose probabilities reach this sum; 1: from all. The trainer computes logprobs
    over the tokens that could be drawn."""
    top_k: Annotated[int, Field(ge=0, le=MOST_KEPT)] = Field(default=0)
    """Draw from this many most probable tokens, at most 256; 0: from all, or from 256 with top_p or min_p."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.0)
    """Draw from tokens of at least this probability, relative to the highest; 0: from all."""
    min_new_tokens: NonNegativeInt = Field(default=0)
    """Tokens before which a completion does not end by itself."""
    stop: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...] = Field(default=())
    """Texts that end a completion, after min_new_tokens; it includes the text. Not special tokens."""
    by_dataset: dict[str, dict[str, Any]] = Field(default={})
    """Other values for a dataset of data.path: { "hard.jsonl" = { max_new_tokens = 512 } }. Each setting of this table
    except group_size; max_new_tokens may only be lower."""

    @property
    def kept_tokens(self) -> int:
        """The top-k of a truncated distribution; 0: it is whole."""
        return self.top_k or (MOST_KEPT if self.top_p < 1 or self.min_p > 0 else 0)

    def of(self, source: str) -> "SamplingSettings":
        """Return the values for problems of ``source``."""
        own = {name: getattr(self, name) for name in type(self).model_fields if name != "by_dataset"}
        return SamplingSettings.model_validate({**own, **self.by_dataset.get(source, {})})

    @model_validator(mode="after")
    def _agree(self) -> "SamplingSettings":
        for source, others in self.by_dataset.items():
            where = f'sampling.by_dataset."{source}"'
            if refused := {"group_size", "by_dataset"} & others.keys():
                raise ValueError(f"expected another setting in {where} than {min(refused)}: leave it out")
            if self.of(source).max_new_tokens > self.max_new_tokens:
                raise ValueError(
                    f"expected max_new_tokens <= {self.max_new_tokens}, that of [sampling], in {where}, found "
                    f"{others['max_new_tokens']}: raise sampling.max_new_tokens and lower it for the other datasets"
                )
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"expected sampling.min_new_tokens <= sampling.max_new_tokens, found {self.min_new_tokens} > "
                f"{self.max_new_tokens}: change one of them"
            )
        return self


class VllmSettings(Section):
    """vLLM, where it generates."""

    tensor_parallel_size: Count = Field(default=1)
    """GPUs per replica that share each layer."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = Field(default=0.85)
    """Share of the GPU's memory for vLLM, weights and key-value cache together."""
    max_model_len: NonNegativeInt = Field(default=0)
    """Maximum length of prompt and completion, in tokens; 0: the model's context. It also decides the factors of
    longrope, in the trainer too."""
    quantization: Literal["none", "fp8"] = Field(default="none")
    """Number type of the linear layers' weights and inputs while generating. `fp8`: half the memory of bfloat16, and
    samples of a slightly different policy, so algorithm.correction must be on (docs/weights.md)."""
    arguments: dict[str, Any] = Field(default={})
    """More of vLLM's AsyncEngineArgs: {enforce_eager = true} starts without CUDA graphs, {max_num_seqs = 64} limits the
    samples decoded at a time (default: rollout.max_groups × sampling.group_size)."""

    @model_validator(mode="after")
    def _agree(self) -> "VllmSettings":
        for name in ("quantization", "quantization_config"):
            if name in self.arguments:
                raise ValueError(
                    f"expected no {name} in rollout.vllm.arguments, where nothing proves that new weights are quantised as vLLM loads "
                    'them: set rollout.vllm.quantization = "fp8", or leave it out'
                )
        return self


class RolloutSettings(Section):
    """The replicas that generate."""

    replicas: Count = Field(default=1)
    """Replicas that `penstock up` starts."""
    nodes: Count = Field(default=1)
    """Hosts per replica, for a model that does not fit on one (vLLM only). Start the service on each; they share
    rollout.vllm.tensor_parallel_size equally."""
    node: NonNegativeInt = Field(default=0)
    """Index of this host among rollout.nodes. Host 0 is the replica."""
    rendezvous: str = Field(default="", pattern=r"^$|^.+:[0-9]+$")
    """`host:port` on the first of several hosts at which the others join; without a password."""
    secret_file: OptionalPath = Field(default=None)
    """File whose first line is the secret of the workers of several hosts."""
    engine: Literal["auto", "vllm", "transformers", "scripted"] = Field(default="auto")
    """Engine that generates: vLLM, Hugging Face transformers, or a script for tests. `auto`: vLLM if it is installed
    and there is a GPU, else transformers."""
    max_groups: PositiveInt = Field(default=16)
    """Groups whose samples one replica generates at a time: max_groups × sampling.group_size samples, of any groups."""
    gpus: tuple[NonNegativeInt, ...] = Field(default=())
    """GPU indices for the replicas, in turn, among those in CUDA_VISIBLE_DEVICES, under `penstock up`.
    Empty: all."""
    engines_per_gpu: Literal["auto", 1, 2, 3, 4, 5, 6, 7, 8] = Field(default=1)
    """vLLM engines of one replica on its GPU. `auto`: 1 to 3, by how busy the GPU is in a trial at the start."""
    vllm: VllmSettings = Field(default=VllmSettings())
    """vLLM, where it generates."""

    @property
    def max_model_len(self) -> int:
        """The longest sequence, prompt included, whichever engine generates; 0: as long as the model reads."""
        return self.vllm.max_model_len

    @model_validator(mode="after")
    def _agree(self) -> "RolloutSettings":
        self._check_engines()
        if (self.nodes, self.node) == (1, 0):
            return self
        if not self.rendezvous or self.node >= self.nodes or self.secret_file is None:
            raise ValueError(
                f"expected rollout.rendezvous, rollout.secret_file and rollout.node < {self.nodes} with rollout.nodes = "
                f"{self.nodes}, found {self.rendezvous!r}, {self.secret_file} and {self.node}: change one of them"
            )
        if self.vllm.tensor_parallel_size % self.nodes:
            raise ValueError(
                f"expected rollout.vllm.tensor_parallel_size to be a multiple of rollout.nodes = {self.nodes}, as many GPUs on "
                f"each host, found {self.vllm.tensor_parallel_size}: change one of them"
            )
        return self

    def _check_engines(self) -> None:
        engines = self.engines_per_gpu
        if engines == "auto" or engines == 1:
            return
        for key, value in (
            ("rollout.vllm.tensor_parallel_size", self.vllm.tensor_parallel_size),
            ("rollout.nodes", self.nodes),
        ):
            if value != 1:
                raise ValueError(
                    f"expected rollout.engines_per_gpu = 1 with {key} = {value}, whose engine spans several GPUs, found {engines}: "
                    "change one of them"
                )
        if "kv_cache_memory_bytes" in self.vllm.arguments:
            raise ValueError(
                "expected no kv_cache_memory_bytes in rollout.vllm.arguments with rollout.engines_per_gpu > 1, which splits the "
                "memory itself: leave it out"
            )


class EpisodesSettings(Section):
    """Episodes of several turns (docs/episodes.md). Set environment, tools, mcp, executor or agent;
    sampling.max_new_tokens then limits a turn."""

    environment: str = Field(default="", pattern=rf"^$|{_OBJECT}|^https?://[^/@\s]+(/[^@\s]*)?$")
    """`package.module:Class` of an environment, or the URL of an OpenEnv server."""
    tools: tuple[Annotated[str, Field(pattern=_OBJECT)], ...] = Field(default=())
    """Functions that the policy can call, each `package.module:function`."""
    mcp: tuple[Annotated[str, Field(pattern=r"\S")], ...] = Field(default=())
    """MCP servers whose tools the policy can call: commands, or URLs (http, https) of streamable HTTP."""
    executor: Literal["", "stdlib", "numpy"] = Field(default="")
    """Interpreter of the tool `python` in the code executor; empty: no such tool."""
    agent: str = Field(
        default="",
        pattern=rf"^$|{_OBJECT}|^https?://[^\s@/?#][^\s@]*$|^tcp://[^/\s]+:[0-9]+$|^ipc:///\S+$",
    )
    """Agent that asks the policy over HTTP: `package.module:function`, the URL to which each episode is POSTed, or
    `tcp://host:port` of an EnvServer of verifiers (docs/episodes.md)."""
    max_turns: Annotated[int, Field(ge=1, le=200)] = Field(default=8)
    """Answers in an episode, at most 200."""
    tool_s: PositiveFloat = Field(default=30.0)
    """Maximum seconds of a tool call, and of `get_reward`."""
    setup_s: PositiveFloat = Field(default=120.0)
    """Maximum seconds of its import, and of `reset`."""
    deadline_s: PositiveFloat = Field(default=1800.0)
    """Seconds after which an episode ends, and is scored. Default: 1800, or 0.05 for each of sampling.max_new_tokens."""
    replicas: Count = Field(default=1)
    """Replicas that `penstock up` starts."""
    max_episodes: PositiveInt = Field(default=256)
    """Episodes that a replica runs at a time."""
    listen: str = Field(default="127.0.0.1:0", pattern=r"^.+:[0-9]+$")
    """`host:port` at which agents reach the policy; port 0: any free one."""

    @property
    def is_on(self) -> bool:
        return bool(self.name)

    @property
    def agent_url(self) -> str:
        """Where an agent is POSTed each episode; empty: the agent is not such a server."""
        return self.agent if self.agent.startswith(("http://", "https://")) else ""

    @property
    def env_server(self) -> str:
        """Address of an EnvServer of verifiers; empty: the agent is another."""
        return self.agent if self.agent.startswith(("tcp://", "ipc://")) else ""

    @property
    def openenv(self) -> str:
        """URL of an OpenEnv server; empty: the environment is a class."""
        return self.environment if "://" in self.environment else ""

    @property
    def profiles(self) -> tuple[str, ...]:
        """The interpreters of the code executor that it needs."""
        return (self.executor,) if self.executor else ()

    @property
    def has_code(self) -> bool:
        """Whether code of the user's runs in processes of this service."""
        return bool(self.environment or self.tools or self.mcp or (self.agent and not self.agent_url))

    @property
    def keeps_state(self) -> bool:
        """Whether a call of a tool may change what later calls answer, so that a call is made once."""
        return bool(self.environment or self.mcp)

    @property
    def patience_s(self) -> float:
        """Seconds after tool_s or setup_s until a process is killed: servers beyond it are first given up there."""
        return 20.0 if self.mcp or self.openenv else 0.0

    @property
    def name(self) -> str:
        """What turns happen in, for prompts and reports."""
        return (
            self.environment
            or self.agent
            or ", ".join((*self.tools, *self.mcp, *(["python"] if self.executor else [])))
        )

    def check_beside(self, others: Sequence[str], rewarded: Sequence[str]) -> None:
        """Raise ValueError for settings that do not work with episodes yet, or scorers ``rewarded`` by no environment."""
        if self.is_on and others:
            raise ValueError(
                f"expected no {others[0]} with [episodes], which do not work together yet: leave one of them out"
            )
        if rewarded and not (self.environment or self.agent):
            raise ValueError(
                f"expected episodes.environment or episodes.agent with the scorer {rewarded[0]!r}, whose value is the reward "
                "that these give: set one of them, or leave the scorer out"
            )

    @model_validator(mode="after")
    def _agree(self) -> "EpisodesSettings":
        own_tools = [name for name in ("environment", "tools", "mcp", "executor") if getattr(self, name)]
        if self.agent and own_tools:
            raise ValueError(
                f"expected no episodes.{own_tools[0]} with episodes.agent, which has tools of its own: leave one of them out"
            )
        host, agent = self.listen.rpartition(":")[0].strip("[]"), urlsplit(self.agent_url).hostname
        if agent and not _HERE.match(agent) and (_HERE.match(host) or host in ("0.0.0.0", "::")):  # noqa: S104 (refused)
            raise ValueError(
                f"expected an address of this machine in episodes.listen that the agent at {agent} can reach, found {self.listen!r}: "
                "set it to host:port"
            )
        changed = sorted(name for name, of in type(self).model_fields.items() if getattr(self, name) != of.default)
        if not self.is_on and changed:
            raise ValueError(
                f"expected episodes.environment, tools, mcp, executor or agent with episodes.{changed[0]}, which has no effect without: set one of them, or leave it out"
            )
        return self
