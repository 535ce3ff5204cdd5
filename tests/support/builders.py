"""Small, whole messages for tests."""

import dataclasses
import json

import numpy as np

from penstock.shared.bus.assembly import bare
from penstock.shared.bus.messages import (
    Ended,
    Experience,
    FinishReason,
    GroupId,
    PolicyVersion,
    Prompt,
    RolloutGroup,
    Sample,
    SampleScores,
    Sampling,
    Score,
    ScoreStatus,
)


def prompt(
    group_id: int = 0, text: str = "12+34=", answer: str = "46", samples: int = 2, min_version: int = 0
) -> Prompt:
    return Prompt(
        group_id=GroupId(group_id),
        problem=f"train.jsonl:{group_id + 1}",
        sampling=Sampling(samples=samples, max_new_tokens=4, temperature=1.0),
        text=text,
        answer=answer,
        extra={"level": 1},
        min_version=PolicyVersion(min_version),
        admitted_at_s=1.5,
    )


def sample(text: str = "46", version: int = 0, finish: FinishReason = FinishReason.STOP, tokens: int = 3) -> Sample:
    return Sample(
        token_ids=np.array([int(text != "46"), *range(1, tokens)], dtype=np.int32),
        behavior_logprobs=np.full(tokens, -0.5, dtype=np.float32),
        version_spans=np.array([[0, version]], dtype=np.int32),
        finish_reason=finish,
        text=text,
    )


def unlike(place: int, tokens: int) -> Sample:
    """Return a sample of which no beginning is that of another place: equal ones are computed once."""
    made = sample(tokens=tokens)
    return dataclasses.replace(made, token_ids=made.token_ids + np.int32(100 * place))


def tree(version: int = 0) -> Sample:
    """An episode: question, turn, observation, turn; another turn at the question."""
    sampled = np.array([0, 0, 0, 1, 1, 0, 0, 1, 1, 1], dtype=np.float32)
    return dataclasses.replace(
        sample("46", version, tokens=10),
        behavior_logprobs=-0.5 * sampled,
        segments=np.array([[0, -1, 0], [3, 0, 1], [5, 1, 0], [7, 2, 1], [8, 0, 1]], dtype=np.int32),
        ended=Ended.TURNS,
        transcript=b"[]",
        environment_reward=0.5,
        turn_rewards=np.array([0.0, 1.0, 0.5], dtype=np.float32),
    )


def episode() -> Sample:
    """A tool call, its result and the answer, as the service of episodes has them."""
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 12, "b": 34}}}
    turns = [
        {
            "after": None,
            "segment": 1,
            "messages": [
                {"role": "user", "content": "12+34="},
                {"role": "assistant", "tool_calls": [call]},
            ],
        },
        {
            "after": 0,
            "segment": 3,
            "messages": [{"role": "tool", "content": "46", "name": "add"}, {"role": "assistant", "content": "46"}],
        },
    ]
    of = tree()
    line = dataclasses.replace(of, segments=of.segments[:4], turn_rewards=of.turn_rewards[:0])
    return dataclasses.replace(line, transcript=json.dumps({"turns": turns}).encode())


def group(group_id: int = 0, texts: tuple[str, ...] = ("46", "47"), version: int = 0) -> RolloutGroup:
    return RolloutGroup(
        prompt=prompt(group_id, samples=len(texts)),
        prompt_token_ids=np.array([5, 6, 7], dtype=np.int32),
        samples=tuple(sample(text, version) for text in texts),
        replica="rollout-0",
        started_at_s=2.0,
        finished_at_s=3.0,
    )


def part(of: Prompt, version: int = 0, text: str = "46") -> RolloutGroup:
    """The result of one entry of an admitted group."""
    made = group(of.group_id, (text,), version)
    return dataclasses.replace(made, prompt=bare(of))


def experience(group_id: int = 0, rewards: tuple[float, ...] = (1.0, 0.0), version: int = 0) -> Experience:
    texts = tuple("46" if reward > 0 else "47" for reward in rewards)
    return Experience(
        group=group(group_id, texts, version),
        rewards=np.array(rewards, dtype=np.float32),
        scores=tuple(SampleScores((Score("answer", ScoreStatus.OK, reward),)) for reward in rewards),
        scored_at_s=4.0,
        score_s=0.1,
    )
