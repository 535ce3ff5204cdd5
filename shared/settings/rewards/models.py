"""Models of the reward service: ``[reward.models]``, and reward models among ``[[reward.scorers]]``."""

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from penstock.shared.settings.rewards.base import OpinionScorer
from penstock.shared.settings.section import Section


class ModelsSettings(Section):
    """Where the reward service runs its models, reward models and the reference, and how it fills their forward passes."""

    device: str = Field(default="auto")
    """Device: `auto` (as run.device; with `placement.mode = "shared"` and without reward.gpus, the trainer's, in turn),
    `cpu`, `cuda`, or one GPU, as `cuda:0`. Weights are bfloat16 on a GPU (the reference: policy.dtype), else float32."""
    batch_tokens: PositiveInt = Field(default=16_384)
    """Maximum tokens of a forward pass, padding included; a longer sample is alone."""


class TeacherSettings(Section):
    """A model with the policy's vocabulary whose logprobs of the policy's tokens travel with each group, to distil it."""

    name: str = Field(pattern=r"^[a-z_][a-z0-9_]*$")
    """Name in `data.teacher_field` and in metrics."""
    model: str = Field(min_length=1)
    """A folder in Hugging Face form, or a hub name; with `url`, its name at the endpoint."""
    url: str = Field(default="", pattern=r"^(https?://[^@\s]+)?$")
    """Base URL of a vLLM server that holds the teacher, such as http://teacher:8000/v1, without a user or password.
    Empty: the reward service holds it."""
    key_source: str = Field(default="", pattern=r"^(env:\w+|file:.+)?$")
    """Where the endpoint's API key is: `env:VARIABLE`, or `file:PATH` (a mounted secret). Empty: no key."""

    @property
    def setting(self) -> str:
        return f"teacher {self.name!r} in [[reward.teachers]]"


class ModelWork(ModelsSettings):
    """[reward.models] on this machine: run.device and run.threads filled in."""

    threads: NonNegativeInt = Field(default=0)
    """CPU threads of forward passes; 0: as torch decides."""


class ModelScorer(OpinionScorer):
    """A reward model: any sequence classifier in Hugging Face form, or a trunk with a scalar head."""

    kind: Literal["model"]
    """The reward model."""
    model: str
    """Reward model: a folder in Hugging Face form, or a hub name. A sequence classifier, or a trunk with a linear layer
    (`score`, `v_head`, `value_head`, …), which is read at the last token."""
    trust_remote_code: bool = Field(default=False)
    """Whether to run Python code that comes with the model."""
    label: str = Field(default="")
    """Output that is the value, by name or number; empty: the only one."""
    value: Literal["logit", "probability"] = Field(default="logit")
    """The output itself (`logit`), or its `probability`: the sigmoid of a single output, the softmax of several."""
    template: str = Field(default="auto")
    """How prompt and completion become text: `chat` (the tokenizer's chat template), `plain` (concatenated; messages
    joined by line breaks), `auto` (chat if the tokenizer has a template), or your own chat template (Jinja).
    A text longer than the model's context loses its beginning."""

    @property
    def model_setting(self) -> str:
        return f"model of scorer {self.name!r} in [[reward.scorers]]"

    @property
    def own_template(self) -> str | None:
        return None if self.template in ("auto", "chat", "plain") else self.template

    @model_validator(mode="after")
    def _agree(self) -> "ModelScorer":
        if self.own_template is not None and "{" not in self.own_template:
            raise ValueError(
                f'expected "auto", "chat", "plain" or a Jinja template as template of scorer {self.name!r}, found '
                f'"{self.template}": change template in [[reward.scorers]]'
            )
        return self
