"""What the weights probe detects in a real model: healthy engines and planted loading faults, on a CPU.

    python -m benchmarks.weights.probe_faults --model path/to/SmolLM2-135M-Instruct

The trainer is a policy in float32, the engine transformers in bfloat16, or with ``--dtype float32``, which is faster on
most CPUs, without rounding of its own; texts are the model's own completions of ``PROMPTS``. Prints one JSON line: for each fault the mean gap (nats), and how many times the limit it is.
"""

import argparse
import json
import sys
import time
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.services.rollout.probe_check import judge
from penstock.services.trainer.rank0.probe import Prober
from penstock.shared.bus.messages import Int32Array, Probe
from penstock.shared.settings import loads
from tests.support.probed import FAULTS, ProbedTrainer, groups_of, moved, plant, scored

PROMPTS = (
    "What is 12 + 7 + 30?",
    "State the final answer to the following arithmetic problem: 4 + 5 - 61 =",
    "Name three fruits and say why they are healthy.",
    "Write a short poem about the sea.",
    "Sort the numbers 5, 3, 9 and 1.",
    "If Tom has 3 apples and buys 4 more, how many has he? Think step by step.",
)
STEPS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
"""Changes of every matrix by one step, relative to its size."""


def completions(model: str, tokens: int) -> list[Int32Array]:
    torch.manual_seed(0)
    tokenizer, policy = (
        AutoTokenizer.from_pretrained(model),
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
    )
    texts = []
    for prompt in PROMPTS:
        turns = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=False)
        drawn = policy.generate(
            ids, do_sample=True, top_k=0, max_new_tokens=tokens, pad_token_id=tokenizer.eos_token_id
        )
        texts.append(drawn[0].numpy().astype(np.int32))
        print(tokenizer.decode(drawn[0]), file=sys.stderr, flush=True)
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--faults", nargs="*", choices=tuple(FAULTS), default=list(FAULTS))
    arguments = parser.parse_args()
    settings = loads(f"policy.model = {arguments.model!r}", "the command line")
    dtype = getattr(torch, arguments.dtype)
    margin = settings.guards.limit("probe")
    texts = completions(arguments.model, arguments.tokens)
    probe = Prober(ProbedTrainer(arguments.model), settings).next(texts)  # type: ignore[arg-type]
    assert probe is not None

    def engine() -> Any:
        return AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype).eval()

    def judged(name: str, model: Any, of: Probe) -> dict[str, float | bool]:
        began = time.perf_counter()
        finding = judge(scored(model, of), of, margin)
        print(name, finding, round(time.perf_counter() - began, 1), file=sys.stderr, flush=True)
        figures = {"gap_nats": round(finding.gap, 5), "of_limit": round(finding.gap / finding.limit, 2)}
        return {**figures, "missing": round(finding.missing, 3), "alarm": bool(finding.problem)}

    results = {"healthy": judged("healthy", engine(), probe)}
    for name in arguments.faults:
        model = engine()
        if plant(name, model):
            results[name] = judged(name, model, probe)
    stale = {}
    for relative in STEPS:
        trainer = ProbedTrainer(arguments.model)
        prober = Prober(trainer, settings)  # type: ignore[arg-type]
        prober.prepare(groups_of(texts))
        moved(trainer.policy.model, relative)
        after = prober.next()
        assert after is not None
        change = float(np.abs(after.change).mean())
        stale[str(relative)] = {"change_nats": round(change, 5), **judged(f"stale {relative}", engine(), after)}
    noise = float(np.abs(probe.noise).mean())
    print(
        json.dumps(
            {
                "tokens": len(probe.logprobs),
                "noise_nats": round(noise, 5),
                "margin": margin,
                "faults": results,
                "stale": stale,
            }
        )
    )


if __name__ == "__main__":
    main()
