"""The settings of scorers: one class for each kind of ``[[reward.scorers]]`` table.

Each kind is scored by one class of ``services/reward``; docs/rewards.md says what each means and gives an example.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from shared.settings.rewards.models import ModelScorer
from shared.settings.section import Section

LenientRule = Literal["case", "prose", "added_unit", "units", "percent", "bases", "brackets", "whole", "restating"]
"""The names of the rules that let an answer count that is not exactly the reference (docs/rewards.md, "Leniency")."""


class AnswerScorer(Section):
    """Compares the completion's answer with the reference."""

    kind: Literal["answer"]
    """The answer matcher."""
    name: str = Field(default="answer", pattern=r"^[a-z_][a-z0-9_]*$")
    """Its name in reward.expression and in metrics."""
    mode: Literal["exact", "numeric", "math"] = Field(default="math")
    """`exact` text, `numeric` value within tolerance, or `math` (symbolic, by math-verify)."""
    extract: Literal["whole", "boxed", "hashes", "last_number", "choice", "tag", "auto"] = Field(default="auto")
    """Where the answer stands in the completion: all of it, in \\boxed{}, after ####, the last number, the letter of a
    multiple choice (compared as a letter, whatever the mode), in the tag named by `tag`, or the first of boxed, hashes,
    whole."""
    tag: str = Field(default="answer", min_length=1)
    """With extract = "tag": `answer` means <answer>…</answer>."""
    choices: str = Field(default="ABCDE", pattern=r"^[A-Z]{2,26}$")
    """With extract = "choice": the letters that can be chosen."""
    tolerance: NonNegativeFloat = Field(default=1e-6)
    """Largest relative difference of decimals that are equal; whole numbers and fractions are exact."""
    lenient: tuple[LenientRule, ...] = Field(default=("case", "prose", "added_unit"))
    """Differences from the reference that are forgiven: `case` of words; an answer stated in `prose` rather than alone;
    an `added_unit` that the reference does not have; `units`, `percent` signs and number `bases` that only one side has; `brackets` of points, sets and lists; the tolerance
    for `whole` numbers; `restating` the question, such as 12+34 for 46."""
    needs_stop: bool = Field(default=False)
    """A completion cut at its length limit is `wrong_format`."""
    timeout_s: PositiveFloat = Field(default=1.0)
    """Processor time of one comparison; one that takes more is killed: status `timeout`, value 0."""
    processes: PositiveInt = Field(default=1)
    """Killable processes that compare."""

    def strict(self) -> "AnswerScorer":
        """Return these settings with every leniency off."""
        return self.model_copy(update={"lenient": (), "tolerance": 0.0})


FormatRule = Literal["tags", "order", "outside", "pattern", "length", "tokens", "scripts", "json", "stop"]
"""The names of the rules that a format scorer can have."""


class TagRule(Section):
    """One pair of tags that the completion must hold."""

    tag: str = Field(default="answer", min_length=1)
    """`think` means <think>…</think>."""
    required: bool = Field(default=True)
    """It must be there."""
    once: bool = Field(default=True)
    """It must not be there twice."""


class FormatScorer(Section):
    """Checks the completion's form by declared rules; its value is the share of rules that hold."""

    kind: Literal["format"]
    """The format checker."""
    name: str = Field(default="format", pattern=r"^[a-z_][a-z0-9_]*$")
    """Its name in reward.expression and in metrics."""
    tags: tuple[TagRule, ...] = Field(default=())
    """Tags, in the order in which they must come."""
    nothing_outside: bool = Field(default=False)
    """No text but white space outside the tags."""
    pattern: str = Field(default="")
    """A regular expression that must match all of the completion."""
    min_characters: NonNegativeInt = Field(default=0)
    """Shortest completion."""
    max_characters: PositiveInt | None = Field(default=None)
    """Longest completion."""
    min_tokens: NonNegativeInt = Field(default=0)
    """Shortest completion, in the policy's tokens."""
    max_tokens: PositiveInt | None = Field(default=None)
    """Longest completion, in the policy's tokens."""
    scripts: tuple[str, ...] = Field(default=())
    """Unicode scripts of its letters, such as ["Latin"] or ["Han", "Hiragana", "Katakana"]; none: any."""
    min_script_share: Annotated[float, Field(gt=0, le=1)] = Field(default=0.95)
    """So large a share of the letters is in one of `scripts`; text without letters keeps this rule."""
    json_schema: dict[str, Any] = Field(default={})
    """A JSON schema that the completion, or what stands in the tag `json_tag`, must keep; {type = "object"}, say."""
    json_tag: str = Field(default="")
    """With json_schema: `answer` means that the JSON stands in the last <answer>…</answer>; empty: it is all of the
    completion."""
    json_timeout_s: PositiveFloat = Field(default=0.5)
    """Processor time of one check against json_schema; one that takes more is killed: status `timeout`, value 0."""
    needs_stop: bool = Field(default=False)
    """It must end by itself, not at its length limit."""
    weights: dict[FormatRule, PositiveFloat] = Field(default={})
    """How much a rule counts, by its name; 1 where nothing is said: {json = 3, length = 0.5}. `tags` counts for each tag."""


class CodeScorer(Section):
    """Runs the completion's program on the problem's tests, isolated by the executor (docs/rewards.md, "Code")."""

    kind: Literal["code"]
    """The code scorer."""
    name: str = Field(default="code", pattern=r"^[a-z_][a-z0-9_]*$")
    """Its name in reward.expression and in metrics."""
    tests_field: str = Field(default="tests", min_length=1)
    """The dataset's column with the tests."""
    credit: Literal["all", "share"] = Field(default="all")
    """1 for a program that passes `all` tests, else 0; or the `share` of tests that it passes."""
    needs_block: bool = Field(default=True)
    """A completion without a fenced block is `wrong_format`; otherwise all of it is the program."""
    max_tests: NonNegativeInt = Field(default=0)
    """Only the first so many tests of a problem are run; 0: all."""
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
    in_flight: PositiveInt = Field(default=64)
    """Most tests that one reward replica has with the executor at a time."""
    wait_s: NonNegativeFloat = Field(default=30.0)
    """Once the executor is known to be away, each attempt at a group waits so long for it before it counts as failed."""


class PythonScorer(Section):
    """The user's own function, in processes of its own."""

    kind: Literal["python"]
    """The user's own scorer."""
    name: str = Field(default="python", pattern=r"^[a-z_][a-z0-9_]*$")
    """Its name in reward.expression and in metrics."""
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


class JudgeScorer(Section):
    """A language model that judges completions, behind any endpoint that speaks OpenAI's chat completions."""

    kind: Literal["judge"]
    """The generative judge."""
    name: str = Field(default="judge", pattern=r"^[a-z_][a-z0-9_]*$")
    """Its name in reward.expression and in metrics."""
    url: str = Field(pattern=r"^https?://[^@\s]+$")
    """Base URL of the endpoint, such as http://judge:8000/v1; no user or password in it."""
    model: str = Field(min_length=1)
    """Name of the judge's model there."""
    api_key_variable: str = Field(default="")
    """Name of the environment variable that holds the key; empty: none, or from api_key_file."""
    api_key_file: Path | None = Field(default=None)
    """File that holds the key and that no other user can read: a mounted secret, say."""
    system: str = Field(default="")
    """The judge's system message; empty: none."""
    template: str = Field(
        default="Question:\n{prompt}\n\nReference answer:\n{answer}\n\nResponse:\n{completion}\n\n"
        "Rate the response from 0 (useless) to 10 (perfect). End with a line `Score: N`."
    )
    """The judge's user message, with {prompt}, {completion}, {answer} and {extra.COLUMN} filled in."""
    pattern: str = Field(default=r"(?i)score:\s*(-?\d+(?:\.\d+)?)")
    """Where the verdict stands in the judge's answer: the first group of this expression's last match."""
    json_field: str = Field(default="")
    """Instead of `pattern`: the judge answers with a JSON object, and the verdict is this field of it."""
    labels: dict[str, float] = Field(default={})
    """What verdicts that are words mean: {yes = 1, no = 0}; then nothing else is a verdict."""
    scale: tuple[float, float] = Field(default=(0.0, 10.0))
    """The verdicts that become values 0 and 1; a number outside is no verdict. Not used with labels."""
    max_tokens: PositiveInt = Field(default=512)
    """Length limit of the judge's answer."""
    temperature: NonNegativeFloat = Field(default=0.0)
    """The judge's softmax temperature."""
    request: dict[str, Any] = Field(default={})
    """More fields of the request's body: {response_format = {type = "json_object"}}."""
    concurrency: PositiveInt = Field(default=16)
    """Requests of one reward replica at a time."""
    requests_per_s: NonNegativeFloat = Field(default=0.0)
    """Most requests that one reward replica begins in a second; 0: no limit."""
    timeout_s: PositiveFloat = Field(default=60.0)
    """A request that takes longer is broken off and counts as failed."""
    attempts: PositiveInt = Field(default=4)
    """Requests for one sample, failed ones and those without a verdict, before it is given up for now."""
    backoff_s: PositiveFloat = Field(default=0.5)
    """The wait after the first failure; it doubles with each, with some chance."""
    max_wait_s: PositiveFloat = Field(default=30.0)
    """Longest wait between two requests for a sample; where the endpoint asks for more, the sample is given up for now."""
    on_unparsable: Literal["unavailable", "zero"] = Field(default="unavailable")
    """What it means when the judge answered each time without a verdict: that the reward is not known, or a reward of 0 with
    the status `crashed`."""

    @model_validator(mode="after")
    def _agree(self) -> "JudgeScorer":
        if self.api_key_variable and self.api_key_file:
            raise ValueError(
                f"expected api_key_variable or api_key_file for scorer {self.name!r}, found both: remove one in "
                "[[reward.scorers]]"
            )
        if not self.scale[0] < self.scale[1]:
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


class RandomScorer(Section):
    """Draws 0 or 1 by lot, whatever the completion: the control of an experiment (nothing should be learned)."""

    kind: Literal["random"]
    """The lot."""
    name: str = Field(default="random", pattern=r"^[a-z_][a-z0-9_]*$")
    """Its name in reward.expression and in metrics."""


Scorer = Annotated[
    AnswerScorer | CodeScorer | FormatScorer | ModelScorer | JudgeScorer | PythonScorer | RandomScorer,
    Field(discriminator="kind"),
]
