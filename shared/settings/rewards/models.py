"""The settings of the models that the reward service runs: reward models among ``[[reward.scorers]]``, and ``[reward.reference]``.

What is computed stands in ``services/reward/scorers/reward_model.py`` and ``reference.py``; docs/rewards.md says when to use which.
"""

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from shared.settings.section import Section


class ModelWork(Section):
    """Where a model of the reward service runs, and how its forward passes are filled."""

    device: str = Field(default="auto")
    """`auto` (a GPU where there is one), `cpu`, or `cuda:0`."""
    dtype: Literal["auto", "float32", "bfloat16"] = Field(default="auto")
    """Number type of its weights; `auto`: bfloat16 on a GPU (for the reference: policy.dtype), float32 on a CPU."""
    threads: NonNegativeInt = Field(default=0)
    """CPU threads of its forward passes; 0: as torch decides."""
    batch_tokens: PositiveInt = Field(default=16_384)
    """Most tokens of a forward pass, padding included; only a single sample that is longer makes a larger one."""
    wait_s: NonNegativeFloat = Field(default=0.01)
    """How long a sample waits for others before a forward pass that is not full begins."""
    offload_after_s: NonNegativeFloat = Field(default=0.0)
    """After so long without work the weights move to the host's memory, and back for the next group; 0: they stay."""


class ModelScorer(ModelWork):
    """A reward model: any sequence classifier in Hugging Face form, or a trunk with a scalar head."""

    kind: Literal["model"]
    """The reward model."""
    name: str = Field(default="model", pattern=r"^[a-z_][a-z0-9_]*$")
    """Its name in reward.expression and in metrics."""
    model: str
    """A folder in Hugging Face form, or a hub name where there is a network."""
    tokenizer: str = Field(default="")
    """Where its tokenizer is; empty: with the model. It reads text, whatever the policy's tokenizer is."""
    trust_remote_code: bool = Field(default=False)
    """Run Python code that comes with the model."""
    head: Literal["classifier", "scalar"] = Field(default="classifier")
    """`classifier`: the model's own class for sequence classification; `scalar`: its trunk, and a linear layer that lies
    beside it in the checkpoint (`score`, `v_head`, `value_head`, …), read at the last token."""
    label: str = Field(default="")
    """Which output is the value, by name or number; may be empty where there is one."""
    value: Literal["logit", "probability"] = Field(default="logit")
    """The output itself; or its sigmoid where there is one output, its softmax where there are several."""
    template: Literal["auto", "chat", "plain"] = Field(default="auto")
    """How prompt and completion become text: by the chat template, or one after the other (`plain`; messages are joined by
    line breaks); `auto`: by the chat template where there is one."""
    chat_template: str = Field(default="")
    """A chat template (Jinja) to use instead of the tokenizer's own."""
    max_tokens: NonNegativeInt = Field(default=0)
    """A longer text loses its beginning, which is counted; 0: the model's own context."""
    normalise: Literal["none", "running"] = Field(default="none")
    """`running`: less the mean and divided by the deviation of all values of the run so far, over all replicas."""

    @property
    def model_setting(self) -> str:
        """How errors name the setting of its model."""
        return f"model of scorer {self.name!r} in [[reward.scorers]]"


class ReferenceSettings(ModelWork):
    """The frozen initial policy, where algorithm.reference = "reward"."""

    logits_chunk_tokens: PositiveInt = Field(default=2048)
    """Logits of so many tokens are in memory at a time."""
