"""Whether every forward pass reaches the same weights, as gradients of several ranks need from ZeRO stage 1 on.

DeepSpeed then adds gradients over ranks bucket by bucket, in the order in which backward passes produce them, and stage
3 gathers each layer's weights on all ranks at once. A rank whose tokens reach fewer weights would wait for the others,
or add its gradients to those of other weights.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.services.trainer.batch.packing import PackedRow, micro_batch
from penstock.services.trainer.model.critic import Critic
from penstock.services.trainer.model.policy import Policy
from penstock.shared.errors import SettingsError


def check(policy: Policy | Critic, rows: Sequence[PackedRow], setting: str) -> None:
    """Compare ``rows`` with the pass of a rank that has no samples. ``setting`` names the model.

    Raises:
        SettingsError: it reaches fewer weights.
    """
    names = {id(parameter): name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    reached, of_none = _reached(policy, rows) & names.keys(), _reached(policy, [])
    missing = [name for key, name in names.items() if key in reached - of_none]
    if missing:
        raise SettingsError(
            f"expected every forward pass to reach the same weights, as several ranks need from trainer.zero_stage = 1 on, found that a short "
            f"one does not reach {len(missing)} of {len(reached)}, the first {missing[0]}, as where experts are modules of their own: set "
            f"trainer.ranks to 1, or trainer.zero_stage to 0, or change {setting}"
        )


def _reached(policy: Policy | Critic, rows: Sequence[PackedRow]) -> set[int]:
    """Return the identities of the parameters in the graph of a forward pass of ``rows``."""
    batch = micro_batch(rows)
    with torch.enable_grad():
        output: Tensor = (
            policy.trunk.hidden_states(batch) if isinstance(policy, Critic) else policy(batch).policy_logprobs_N
        )
    waiting, seen, reached = [output.grad_fn], set[object](), set[int]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            reached.add(id(node.variable))
        waiting.extend(function for function, _ in node.next_functions)
    return reached
