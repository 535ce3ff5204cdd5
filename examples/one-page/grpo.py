"""Asynchronous GRPO on one page: what Penstock's services do, in the order of the algorithm, in one process.

    python examples/one-page/grpo.py --steps 60

It trains the policy of examples/arithmetic to carry: `63+21=` is rewarded for `84`. Samples come from a policy that is
`max_lag` steps old, as if generation and training overlapped. A test compares its step with the trainer's.

Not here, and in the product: several processes, a bus, recovery, packing, sharding, fast generation, weights in flight.

Shapes: G prompts, S samples of each, B = G × S completions, P prompt tokens (padded on the left), T completion tokens.
"""

import argparse
import copy
import json
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

EXAMPLE = Path(__file__).parent.parent / "arithmetic"
GROUPS, SAMPLES, MAX_NEW_TOKENS = 32, 16, 4
MAX_LAG = 1
LEARNING_RATE, BETAS, CLIP, MAX_NORM, EPSILON = 4e-4, (0.9, 0.95), 0.2, 1.0, 1e-4


class Batch(NamedTuple):
    """One step's samples: what a replica generated (rollouts) and the reward service scored (experience)."""

    prompt_BP: Tensor
    prompt_mask_BP: Tensor
    completion_BT: Tensor
    mask_BT: Tensor
    """1 where a token was sampled, up to the end-of-sequence token."""
    behavior_logprobs_BT: Tensor
    """Of the policy that drew the tokens, which is up to MAX_LAG steps older than the one that is trained."""
    rewards_GS: Tensor


def logprobs(policy: Any, batch: Batch) -> Tensor:
    """Return the log-probability of each completion token (B, T), at temperature 1."""
    ids = torch.cat([batch.prompt_BP, batch.completion_BT], 1)
    mask = torch.cat([batch.prompt_mask_BP, batch.mask_BT.to(batch.prompt_mask_BP)], 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = policy(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    completion = logits[:, -batch.completion_BT.shape[1] - 1 : -1].log_softmax(-1)
    chosen: Tensor = completion.gather(-1, batch.completion_BT[..., None])[..., 0]
    return chosen


# 1. rollout: draw S completions of each prompt


@torch.no_grad()
def generate(policy: Any, tokenizer: Any, problems: list[dict[str, str]]) -> Batch:
    """Sample completions token by token, and score them (2)."""
    asked = [problem for problem in problems for _ in range(SAMPLES)]
    prompt = tokenizer([problem["prompt"] for problem in asked], return_tensors="pt", padding=True, padding_side="left")
    ids, mask, drawn = prompt.input_ids, prompt.attention_mask, []
    running = torch.ones(len(asked), dtype=torch.long)
    for _ in range(MAX_NEW_TOKENS):
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = policy(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, -1]
        token = torch.multinomial(logits.softmax(-1), 1)[:, 0]
        ids, mask = torch.cat([ids, token[:, None]], 1), torch.cat([mask, running[:, None]], 1)
        drawn.append(running.clone())
        running *= token != tokenizer.eos_token_id
    width = prompt.input_ids.shape[1]
    completion, sampled = ids[:, width:], torch.stack(drawn, 1)
    batch = Batch(
        prompt.input_ids, prompt.attention_mask, completion, sampled, torch.zeros_like(sampled, dtype=torch.float32),
        score(tokenizer, asked, completion, sampled, running),
    )  # fmt: skip
    return batch._replace(behavior_logprobs_BT=logprobs(policy, batch))


# 2. reward: 1 for the right answer that ended by itself


def score(
    tokenizer: Any, asked: list[dict[str, str]], completion_BT: Tensor, mask_BT: Tensor, open_B: Tensor
) -> Tensor:
    """Return rewards (G, S)."""
    rewards = []
    for problem, tokens, mask, is_open in zip(asked, completion_BT, mask_BT, open_B, strict=True):
        text = tokenizer.decode(tokens[mask.bool()], skip_special_tokens=True)
        rewards.append(float(text == problem["answer"] and not is_open))
    return torch.tensor(rewards).view(-1, SAMPLES)


# 3. advantages: the reward relative to the other samples of the prompt (Shao et al. 2024, arXiv:2402.03300, eq. 4)


def advantages(rewards_GS: Tensor) -> Tensor:
    """Return one advantage per completion (B)."""
    centred = rewards_GS - rewards_GS.mean(1, keepdim=True)
    return (centred / (centred.std(1, correction=0, keepdim=True) + EPSILON)).flatten()


# 4. loss: the clipped ratio to the behavior policy, a mean over all tokens (Schulman et al. 2017, arXiv:1707.06347)


def policy_loss(policy: Any, batch: Batch) -> Tensor:
    """Return the loss, a scalar. The ratio corrects for samples of an older version; the clip bounds it."""
    ratio_BT = (logprobs(policy, batch) - batch.behavior_logprobs_BT).exp()
    advantage_B1 = advantages(batch.rewards_GS)[:, None]
    clipped_BT = ratio_BT.clamp(1 - CLIP, 1 + CLIP)
    loss_BT = -torch.minimum(ratio_BT * advantage_B1, clipped_BT * advantage_B1)
    return (loss_BT * batch.mask_BT).sum() / batch.mask_BT.sum()


# 5. step: one optimizer update makes one policy version


def optimizer_of(policy: Any) -> torch.optim.Optimizer:
    """Return AdamW with the trainer's defaults."""
    return torch.optim.AdamW(policy.parameters(), LEARNING_RATE, BETAS, weight_decay=0.0)


def train(policy: Any, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    """Update the weights; return the loss."""
    loss = policy_loss(policy, batch)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(policy.parameters(), MAX_NORM)
    optimizer.step()
    return loss.item()


# 6. the loop: batches in flight are at most MAX_LAG steps older than the step that trains them


def main(steps: int) -> None:
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLE / "policy")
    policy = AutoModelForCausalLM.from_pretrained(EXAMPLE / "policy", dtype=torch.float32)
    problems = [json.loads(line) for line in (EXAMPLE / "train.jsonl").read_text().splitlines()]
    optimizer, replica, in_flight = optimizer_of(policy), copy.deepcopy(policy), deque[Batch]()
    for step in range(1, steps + 1):
        while len(in_flight) <= MAX_LAG:  # admission: up to MAX_LAG + 1 batches
            chosen = torch.randint(len(problems), (GROUPS,)).tolist()
            in_flight.append(generate(replica, tokenizer, [problems[index] for index in chosen]))
        batch = in_flight.popleft()
        loss = train(policy, optimizer, batch)
        replica.load_state_dict(policy.state_dict())  # the replica pulls the new version
        print(f"step {step:3d}  reward {batch.rewards_GS.mean():.3f}  loss {loss:+.4f}", flush=True)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=60)
    main(arguments.parse_args().steps)
