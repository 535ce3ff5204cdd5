"""The settings of scorers: one class for each kind of ``[[reward.scorers]]`` table.

Each kind is scored by one class of ``services/reward``; docs/rewards.md says what each means and gives an example.
"""

from typing import Annotated, Any, Literal, cast

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from shared.settings.rewards.base import BaseScorer
from shared.settings.rewards.models import ModelScorer

AnswerPlace = Literal["whole", "boxed", "hashes", "last_number", "choice", "tag", "auto"]
LenientRule = Literal["case", "prose", "added_unit", "units", "percent", "bases", "brackets", "whole", "restating"]
"""The names of the rules that let an answer count that is not exactly the reference (docs/rewards.md, "Leniency")."""


class AnswerScorer(BaseScorer):
    """Compares the completion's answer with the reference."""

    kind: Literal["answer"]
    """The answer matcher."""
    mode: Literal["exact", "numeric", "math"] = Field(default="math")
    """`exact` text, `numeric` value within tolerance, or `math` (symbolic, by math-verify)."""
    extract: str = Field(
        default="auto", pattern=r"^(whole|boxed|hashes|last_number|auto|choice(:[A-Z]{2,26})?|tag(:[^<>:]+)?)$"
    )
    """Where the answer is in the completion: `whole` text, `boxed` (\\boxed{}), `hashes` (after ####), `last_number`, `choice`
    (a letter of A to E, or of `choice:ABCDEFGH`), `tag` (<answer>…</answer>, or another, as `tag:final`), or `auto` (the first
    of boxed, hashes and whole)."""
    tolerance: NonNegativeFloat = Field(default=1e-6)
    """Largest relative difference of decimals that are equal; whole numbers and fractions are exact."""
    lenient: tuple[LenientRule, ...] = Field(default=("case", "prose", "added_unit"))
    """Differences from the reference that are forgiven: `case` of words; an answer stated in `prose` rather than alone;
    an `added_unit` that the reference does not have; `units`, `percent` signs and number `bases` that only one side has; `brackets` of points, sets and lists; the tolerance
    for `whole` numbers; `restating` the question, such as 12+34 for 46."""
    needs_stop: bool = Field(default=False)
    """A completion cut at its length limit is `wrong_format`."""
    processes: PositiveInt = Field(default=1)
    """Killable processes that compare."""

    @property
    def place(self) -> AnswerPlace:
        """`extract` without its parameter."""
        return cast("AnswerPlace", self.extract.partition(":")[0])

    @property
    def tag(self) -> str:
        """The tag that holds the answer."""
        return self.extract.removeprefix("tag:") if self.extract.startswith("tag:") else "answer"

    @property
    def choices(self) -> str:
        """The letters of a multiple choice."""
        return self.extract.removeprefix("choice:") if self.extract.startswith("choice:") else "ABCDE"

    def strict(self) -> "AnswerScorer":
        """Return these settings with every leniency off."""
        return self.model_copy(update={"lenient": (), "tolerance": 0.0})


FormatRule = Literal["tags", "order", "outside", "pattern", "length", "tokens", "scripts", "json", "stop"]
"""The names of the rules that a format scorer can have."""


Length = tuple[NonNegativeInt, NonNegativeInt]


class FormatScorer(BaseScorer):
    """Checks the completion's form by declared rules; its value is the share of rules that hold."""

    kind: Literal["format"]
    """The format checker."""
    tags: tuple[Annotated[str, Field(pattern=r"^[^<>?+*]+[?+*]?$")], ...] = Field(default=())
    """Tags in their required order: "think" means <think>…</think> exactly once, "think?" at most once, "think+" at least once,
    "think*" any number of times."""
    nothing_outside: bool = Field(default=False)
    """No text but white space outside the tags."""
    pattern: str = Field(default="")
    """A regular expression that must match all of the completion."""
    characters: Length = Field(default=(0, 0))
    """Shortest and longest completion, in characters; 0: no limit."""
    tokens: Length = Field(default=(0, 0))
    """Shortest and longest completion, in the policy's tokens; 0: no limit."""
    scripts: tuple[str, ...] = Field(default=())
    """Unicode scripts of at least 95 % of its letters, such as ["Latin"] or ["Han", "Hiragana", "Katakana"]; empty: any."""
    json_schema: dict[str, Any] = Field(default={})
    """A JSON schema that the completion, or what stands in the tag `json_tag`, must keep; {type = "object"}, say."""
    json_tag: str = Field(default="")
    """With json_schema: `answer` means that the JSON stands in the last <answer>…</answer>; empty: it is all of the
    completion."""
    needs_stop: bool = Field(default=False)
    """It must end by itself, not at its length limit."""
    weights: dict[FormatRule, PositiveFloat] = Field(default={})
    """How much a rule counts, by its name; 1 where nothing is said: {json = 3, length = 0.5}. `tags` counts for each tag."""


class CodeScorer(BaseScorer):
    """Runs the completion's program on the problem's tests, isolated by the executor (docs/rewards.md, "Code")."""

    kind: Literal["code"]
    """The code scorer."""
    tests_field: str = Field(default="tests", min_length=1)
    """The dataset's column with the tests."""
    credit: Literal["all", "share"] = Field(default="all")
    """1 for a program that passes `all` tests, else 0; or the `share` of tests that it passes."""
    needs_block: bool = Field(default=True)
    """A completion without a fenced block is `wrong_format`; otherwise all of it is the program."""
    tolerance: NonNegativeFloat = Field(default=0.0)
    """Numbers a and b are equal where |a - b| <= tolerance · max(1, |a|, |b|); 0: where Python says that they are."""
    timeout_s: Annotated[float, Field(gt=0, le=600)] = Field(default=5.0)
    """Wall time of one test, and its CPU time."""
    memory_mib: PositiveInt = Field(default=512)
    """Address space of one test."""
    output_kib: Annotated[int, Field(gt=0, le=10_240)] = Field(default=1024)
    """Most that one test may write; what the executor answers with has to fit into a frame of 64 MiB."""
    profile: Literal["stdlib", "numpy"] = Field(default="stdlib")
    """The interpreter: with the standard library alone, or with numpy."""


class PythonScorer(BaseScorer):
    """The user's own function, in processes of its own."""

    kind: Literal["python"]
    """The user's own scorer."""
    function: str = Field(min_length=1)
    """`package.module:function`, or the name of an entry point in the group `penstock.scorers`. It is called with a sample
    and its prompt and returns a number or a Result; it may be async."""
    processes: PositiveInt = Field(default=1)
    """Killable processes; each scores one sample at a time."""
    timeout_s: PositiveFloat = Field(default=30.0)
    """A sample that takes longer is given up and its process killed."""
    on_error: Literal["unavailable", "zero"] = Field(default="unavailable")
    """What an exception, a late answer or a dead process means: that the reward is not known (the group is tried again, then
    buried), or a reward of 0 with the status `crashed` or `timeout`."""
    memory_mib: NonNegativeInt = Field(default=0)
    """Limit of a process's address space; 0: none."""
    environment: tuple[str, ...] = Field(default=())
    """Names of environment variables that the function may see. Others, the bus's password among them, it does not."""


class JudgeScorer(BaseScorer):
    """A language model that judges completions, behind any endpoint that speaks OpenAI's chat completions."""

    kind: Literal["judge"]
    """The generative judge."""
    url: str = Field(pattern=r"^https?://[^@\s]+$")
    """Base URL of the endpoint, such as http://judge:8000/v1; no user or password in it."""
    model: str = Field(min_length=1)
    """Name of the judge's model there."""
    key_source: str = Field(default="", pattern=r"^(env:\w+|file:.+)?$")
    """Where the endpoint's API key is: `env:VARIABLE`, or `file:PATH` (a mounted secret); empty: no key."""
    system: str = Field(default="")
    """The judge's system message; empty: none."""
    template: str = Field(
        default="Question:\n{prompt}\n\nReference answer:\n{answer}\n\nResponse:\n{completion}\n\n"
        "Rate the response from 0 (useless) to 10 (perfect). End with a line `Score: N`."
    )
    """The judge's user message, with {prompt}, {completion}, {answer} and {extra.COLUMN} filled in."""
    pattern: str = Field(default=r"(?i)score:\s*(-?\d+(?:\.\d+)?)")
    """Where the verdict is in the judge's answer: the first group of this expression's last match, or, as `json:FIELD`, a field
    of the last JSON object that has it."""
    scale: tuple[float, float] | dict[str, float] = Field(default=(0.0, 10.0))
    """Numbers that become values 0 and 1 (one outside is no verdict), or the value of each verdict that is a word: {yes = 1, no = 0}."""
    request: dict[str, Any] = Field(default={})
    """Fields of the request's body, over {max_tokens = 512, temperature = 0}: {response_format = {type = "json_object"}}."""
    concurrency: PositiveInt = Field(default=16)
    """Requests of one reward replica at a time."""
    requests_per_s: NonNegativeFloat = Field(default=0.0)
    """Most requests that one reward replica begins in a second; 0: no limit."""
    timeout_s: PositiveFloat = Field(default=60.0)
    """A request that takes longer is broken off and counts as failed."""
    on_unparsable: Literal["unavailable", "zero"] = Field(default="unavailable")
    """What it means when the judge answered each time without a verdict: that the reward is not known, or a reward of 0 with
    the status `crashed`."""

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
        if "{completion}" not in self.template:
            raise ValueError(
                f"expected {{completion}} in the template of scorer {self.name!r}, found none: the judge would not see what "
                "it judges; change template in [[reward.scorers]]"
            )
        return self


class RandomScorer(BaseScorer):
    """Draws 0 or 1 by lot, whatever the completion: the control of an experiment (nothing should be learned)."""

    kind: Literal["random"]
    """The lot."""


Scorer = Annotated[
    AnswerScorer | CodeScorer | FormatScorer | ModelScorer | JudgeScorer | PythonScorer | RandomScorer,
    Field(discriminator="kind"),
]
