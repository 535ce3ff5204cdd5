"""The kinds of ``[[reward.scorers]]`` (docs/rewards.md)."""

import itertools
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from penstock.shared.settings.rewards.base import BaseScorer, OpinionScorer
from penstock.shared.settings.rewards.models import ModelScorer
from penstock.shared.settings.section import Count


def _tags(name: str) -> tuple[str, str]:
    return f"<{name}>", f"</{name}>"


AnswerPlace = Literal["whole", "boxed", "hashes", "last_number", "choice", "tag", "auto"]
LenientRule = Literal["case", "prose", "added_unit", "units", "percent", "bases", "brackets", "whole", "restating"]
"""The names of the rules that let an answer count that is not exactly the reference (docs/rewards.md, "Leniency")."""
AnswerPreset = Literal["own", "strict", "math-verify", "qwen-math"]
_QWEN_TOLERANCE = 1e-4


class AnswerScorer(BaseScorer):
    """Compares the completion's answer with the reference."""

    kind: Literal["answer"]
    """Compares with the reference answer."""
    mode: Literal["exact", "numeric", "math"] = Field(default="math")
    """How answers are compared: `exact` text, `numeric` value within the tolerance, or `math` (symbolic, by
    math-verify)."""
    extract: str = Field(
        default="auto", pattern=r"^(whole|boxed|hashes|last_number|auto|choice(:[A-Z]{2,26})?|tag(:[^<>:]+)?)$"
    )
    """Where the answer is in the completion: `whole` text, `boxed` (\\boxed{}), `hashes` (after ####), `last_number`,
    `choice` (a letter of A to E, or of `choice:ABCDEFGH`), `tag` (<answer>…</answer>, or another, as `tag:final`),
    or `auto` (the first of boxed, hashes and whole)."""
    tolerance: NonNegativeFloat = Field(default=1e-6)
    """Largest relative difference of equal decimals; whole numbers and fractions are exact."""
    lenient: tuple[LenientRule, ...] = Field(default=("case", "prose", "added_unit", "units"))
    """Differences from the reference that are forgiven (docs/rewards.md, "Leniency"): `case`, `prose`, `added_unit`,
    `units`, `percent`, `bases`, `brackets`, `whole`, `restating`."""
    preset: AnswerPreset = Field(default="own")
    """Whose verdicts to reproduce: our `own`, by `lenient` and `tolerance`; `strict`, ours without leniency;
    `math-verify`, the library on the whole completion; `qwen-math`, the grader of Qwen2.5-Math's evaluation."""
    needs_stop: bool = Field(default=False)
    """Whether a completion that was cut at its length limit is `wrong_format`."""

    @model_validator(mode="after")
    def _check_preset(self) -> "AnswerScorer":
        fields = type(self).model_fields
        changed = [name for name in ("lenient", "tolerance") if getattr(self, name) != fields[name].default]
        if self.preset != "own" and (changed or self.mode != "math"):
            raise ValueError(
                f'expected preset = "own" beside {" and ".join(changed) or "this mode"}, which preset = '
                f'"{self.preset}" sets by itself: leave one of them out'
            )
        return self

    @property
    def forgiven(self) -> frozenset[LenientRule]:
        """The lenient rules of the preset."""
        of = {"own": self.lenient, "qwen-math": [rule for rule in get_args(LenientRule) if rule != "whole"]}
        return frozenset(of.get(self.preset, ()))

    @property
    def closeness(self) -> float:
        """The tolerance of the preset."""
        return {"own": self.tolerance, "qwen-math": _QWEN_TOLERANCE}.get(self.preset, 0.0)

    @property
    def place(self) -> AnswerPlace:
        """`extract` without its parameter."""
        return cast("AnswerPlace", self.extract.partition(":")[0])

    @property
    def markers(self) -> tuple[str, ...]:
        return _tags(self.tag) if self.place == "tag" else ()

    @property
    def tag(self) -> str:
        return self.extract.removeprefix("tag:") if self.extract.startswith("tag:") else "answer"

    @property
    def choices(self) -> str:
        return self.extract.removeprefix("choice:") if self.extract.startswith("choice:") else "ABCDE"

    def strict(self) -> "AnswerScorer":
        """Return these settings with every leniency off."""
        return self.model_copy(update={"preset": "own", "lenient": (), "tolerance": 0.0})


class FormatScorer(BaseScorer):
    """Checks the completion's form by declared rules; its value is the share of rules that hold, each tag a rule."""

    kind: Literal["format"]
    """Checks the completion's form."""
    tags: tuple[Annotated[str, Field(pattern=r"^[^<>?+*]+[?+*]?$")], ...] = Field(default=())
    """Tags in their required order: "think" means <think>…</think> exactly once, "think?" at most once, "think+" at
    least once, "think*" any number of times."""
    nothing_outside: bool = Field(default=False)
    """Whether only white space may be outside the tags."""
    pattern: str = Field(default="")
    """Regular expression that must match the whole completion."""
    tokens: tuple[NonNegativeInt, NonNegativeInt] = Field(default=(0, 0))
    """Shortest and longest completion, in the policy's tokens; 0: no limit."""
    scripts: tuple[str, ...] = Field(default=())
    """Unicode scripts of at least 95 % of the letters, such as ["Latin"] or ["Han", "Hiragana", "Katakana"]; empty:
    any."""
    json_schema: dict[str, Any] = Field(default={})
    """JSON schema that the completion, or the content of `json_tag`, must satisfy, such as {type = "object"}."""
    json_tag: str = Field(default="")
    """Tag whose last content is the JSON, such as `answer`; empty: the whole completion is."""
    needs_stop: bool = Field(default=False)
    """Whether the completion must end before its length limit."""

    @property
    def reads_answer(self) -> bool:
        return False

    @property
    def markers(self) -> tuple[str, ...]:
        tags = [tag.rstrip("?+*") for tag in (*self.tags, self.json_tag) if tag]
        return (*itertools.chain(*map(_tags, tags)), self.pattern.replace("\\", ""))


class CodeScorer(BaseScorer):
    """Runs the completion's program on the problem's tests, isolated by the executor (docs/rewards.md, "Code")."""

    kind: Literal["code"]
    """Runs the completion's program on tests."""
    tests_field: str = Field(default="tests", min_length=1)
    """Column with the tests."""
    credit: Literal["all", "share"] = Field(default="all")
    """Value of a program: 1 if it passes `all` tests, else 0; or the `share` of tests that it passes."""
    needs_block: bool = Field(default=True)
    """Whether a completion without a fenced block is `wrong_format`; else its whole text is the program."""
    preset: Literal["own", "livecodebench"] = Field(default="own")
    """`livecodebench`: the program and standard outputs as that benchmark reads and compares them (docs/rewards.md)."""
    tolerance: NonNegativeFloat = Field(default=0.0)
    """Numbers a and b are equal if |a - b| <= tolerance · max(1, |a|, |b|); 0: results as Python compares them, and
    decimals of standard output by value (0.50 is 0.5)."""
    timeout_s: Annotated[float, Field(gt=0, le=600)] = Field(default=5.0)
    """Maximum wall time and CPU time of one test, in seconds."""
    memory_mib: PositiveInt = Field(default=512)
    """Maximum address space of one test."""
    output_kib: Annotated[int, Field(gt=0, le=10_240)] = Field(default=1024)
    """Maximum output of one test."""
    profile: Literal["stdlib", "numpy"] = Field(default="stdlib")
    """Interpreter: with the standard library only, or with numpy."""

    @model_validator(mode="after")
    def _as_published(self) -> "CodeScorer":
        if self.preset == "livecodebench" and self.tolerance:
            raise ValueError(
                f'expected tolerance = 0 of scorer {self.name!r} with preset = "livecodebench", found {self.tolerance:g}: '
                "change one of them in [[reward.scorers]]"
            )
        return self


class ProcessScorer(OpinionScorer):
    """A scorer that calls the user's functions in killable processes of its own."""

    reads: Literal["answer", "whole"] = Field(default="whole")
    """What it reads: the `answer` after the reasoning (reward.reasoning), or the `whole` completion."""
    processes: Count = Field(default=1)
    """Killable processes; each answers one call at a time."""
    timeout_s: PositiveFloat = Field(default=30.0)
    """Seconds after which a call is given up and its process killed."""
    environment: tuple[str, ...] = Field(default=())
    """Environment variables that the function may read. It does not see others, such as the bus's password."""


class PythonScorer(ProcessScorer):
    """The user's own function of one sample."""

    kind: Literal["python"]
    """Your own function."""
    function: str = Field(min_length=1)
    """`package.module:function`, or an entry point of the group `penstock.scorers`. It receives a sample and its prompt
    and returns a number or a Result; it may be async."""
    on_error: Literal["unavailable", "zero"] = Field(default="unavailable")
    """An exception, a late answer or a dead process is `unavailable` (the group is retried, then buried), or 0 with the
    status `crashed` or `timeout`."""


class TrlScorer(ProcessScorer):
    """Reward functions written for TRL's GRPOTrainer, or functions and rubrics written for verifiers."""

    kind: Literal["trl", "verifiers"]
    """Reward functions written for TRL, or rubrics for verifiers."""
    functions: tuple[Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+(\(.*\))?$")], ...] = Field(min_length=1)
    """Reward functions, as `reward_funcs` of TRL: `package.module:function`, or a factory with its arguments, such as
    `trl.rewards:get_repetition_penalty_reward(ngram_size=3)`. They may be async. With `verifiers`, also rubrics."""
    weights: tuple[float, ...] = Field(default=())
    """Weight of each function in the sum, as `reward_weights` of TRL; empty: 1 each."""

    @model_validator(mode="after")
    def _weighted(self) -> "TrlScorer":
        if self.weights and len(self.weights) != len(self.functions):
            raise ValueError(
                f"expected one weight for each of the {len(self.functions)} functions of scorer {self.name!r}, found "
                f"{len(self.weights)}: change weights in [[reward.scorers]], or leave it out"
            )
        return self


class JudgeScorer(OpinionScorer):
    """A language model that judges completions, behind any endpoint that speaks OpenAI's chat completions."""

    kind: Literal["judge"]
    """A language model that judges completions."""
    url: str = Field(pattern=r"^https?://[^@\s]+$")
    """Base URL of an endpoint with OpenAI's chat completions, such as http://judge:8000/v1, without a user or
    password."""
    model: str = Field(min_length=1)
    """Name of the judge's model at the endpoint."""
    key_source: str = Field(default="", pattern=r"^(env:\w+|file:.+)?$")
    """Where the endpoint's API key is: `env:VARIABLE`, or `file:PATH` (a mounted secret). Empty: no key."""
    template: str = Field(
        default="Question:\n{prompt}\n\nReference answer:\n{answer}\n\nResponse:\n{completion}\n\n"
        "Rate the response from 0 (useless) to 10 (perfect). End with a line `Score: N`."
    )
    """User message, with {prompt}, {completion} (of an episode, the last answer), {transcript} (all messages), {answer}
    and {extra.COLUMN} filled in."""
    pattern: str = Field(default=r"(?i)score[\s*_`\"]*[:=][\s*_`\"(\[]*(-?\d+(?:\.\d+)?)")
    """Where the verdict is in the judge's answer: the first group of this expression's last match, or `json:FIELD`, a
    field of the last JSON object that has it."""
    scale: tuple[float, float] | dict[str, float] = Field(default=(0.0, 10.0))
    """Numbers that become 0 and 1 (one outside is not a verdict), or the value of each word: {yes = 1, no = 0}."""
    request: dict[str, Any] = Field(default={})
    """Fields of the request's body, over {max_tokens = 512, temperature = 0}: {response_format = {type =
    "json_object"}}."""
    concurrency: PositiveInt = Field(default=16)
    """Concurrent requests of one reward replica."""
    timeout_s: PositiveFloat = Field(default=60.0)
    """Seconds after which a request is aborted and counts as failed."""

    @property
    def json_field(self) -> str:
        """The field of a JSON object that is the verdict; empty: `pattern` is a regular expression."""
        return self.pattern.removeprefix("json:") if self.pattern.startswith("json:") else ""

    @model_validator(mode="after")
    def _agree(self) -> "JudgeScorer":
        if isinstance(self.scale, tuple) and not self.scale[0] < self.scale[1]:
            raise ValueError(
                f"expected a scale from low to high for scorer {self.name!r}, found {list(self.scale)}: change scale in "
                "[[reward.scorers]]"
            )
        if not any(place in self.template for place in ("{completion}", "{transcript}")):
            raise ValueError(
                f"expected {{completion}} in the template of scorer {self.name!r}, but it is missing: the judge would "
                f"not see the "
                "completion; change template in [[reward.scorers]]"
            )
        return self


class RandomScorer(BaseScorer):
    """Draws 0 or 1 by lot, whatever the completion: the control of an experiment (nothing should be learned)."""

    kind: Literal["random"]
    """Draws 0 or 1 at random."""


class EnvironmentScorer(BaseScorer):
    """The reward that the environment or the agent of an episode gave it."""

    kind: Literal["environment"]
    """The environment's or the agent's own reward."""


Scorer = Annotated[
    AnswerScorer
    | CodeScorer
    | FormatScorer
    | ModelScorer
    | JudgeScorer
    | PythonScorer
    | TrlScorer
    | RandomScorer
    | EnvironmentScorer,
    Field(discriminator="kind"),
]
