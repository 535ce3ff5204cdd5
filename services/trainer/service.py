"""One rank of the trainer: rank 0 leads on the bus, every rank trains.

Started alone it is the only rank, or the launcher of ``trainer.ranks`` of itself (``launcher``), which join those of other hosts where
``trainer.nodes`` says so. With RANK in its environment it is one rank. A rank that dies takes the others down with it: the
supervisor starts all of them again, and they resume.
"""

import asyncio
import os
import signal
from typing import TYPE_CHECKING

from services.trainer.launcher import LAUNCHER
from shared.model.context import check_context, own_context, read_config
from shared.process import log
from shared.process.endpoints import Endpoints
from shared.process.importing import importing
from shared.process.parent import die_with
from shared.process.service import own_host, serve
from shared.settings import Settings

if TYPE_CHECKING:
    from services.trainer.loop import Leading
    from services.trainer.self_test.self_test import SelfTestResult


async def run(settings: Settings, replica: str) -> int:
    """Run the rank that the environment names; return its exit code."""
    if "RANK" in os.environ and not die_with(int(os.environ.get(LAUNCHER, os.getppid())), signal.SIGKILL):
        return 0
    if int(os.environ.get("RANK", "0")) > 0:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # rank 0 says when to stop
        log.set_up(settings.telemetry.log_level, f"{replica}.{os.environ['RANK']}")
        if os.environ["LOCAL_RANK"] == "0":  # of another host, whose pod is looked at too
            Endpoints(
                own_host(settings), settings.trainer.metrics_port, "trainer.metrics_port", lambda: {"ready": True}
            )
        train(settings, None)
        return 0
    async with serve(settings, "trainer", replica, settings.trainer.metrics_port) as context:
        with importing():
            from services.trainer.rank0.lead import Lead

        lead = Lead(context, asyncio.get_running_loop())
        lead.begin()
        try:
            await asyncio.to_thread(train, settings, lead)
            stopped = settings.trainer.stopped_exit_status
            return stopped if stopped and not await lead.is_over() else 0
        finally:
            await lead.clean_up()


def train(settings: Settings, lead: "Leading | None") -> None:
    """Load the policy, join the other ranks, and train until told to stop."""
    with importing():
        import torch
        import torch.distributed as dist

        from services.trainer.algorithm.update import AdapterOff, Reference
        from services.trainer.loop import Trainer
        from services.trainer.model import adapter, warm_up
        from services.trainer.model.critic import Critic
        from services.trainer.model.engine import TrainingEngine, make_deterministic, pick_device, place
        from services.trainer.model.layers import kernels
        from services.trainer.model.policy import Policy, load_model, load_reference, load_trunk
        from services.trainer.rank_group import start_ranks
        from services.trainer.self_test import self_test

    if settings.trainer.threads:
        torch.set_num_threads(settings.trainer.threads)
    torch.manual_seed(settings.run.seed)
    device = pick_device(settings.trainer.device)
    if settings.trainer.deterministic:
        make_deterministic(device)
    start_ranks(device, settings, own_host(settings))
    algorithm = settings.algorithm
    dtype = torch.float32 if device == "cpu" or settings.policy.dtype == "float32" else torch.bfloat16
    kind, fused, chunk = settings.trainer.attention, settings.trainer.kernels, settings.trainer.logits_chunk_tokens
    bonus = algorithm.entropy_bonus > 0
    context = settings.rollout.vllm.max_model_len
    config = read_config(settings.policy.model)
    check_context(config, context, settings.sampling.max_new_tokens, settings.policy.model)
    with warm_up.beside(config, fused, device):
        model = load_model(settings.policy, dtype, context)
    kernels.install(model, fused, device)
    alone = settings.publishes_adapters
    model = adapter.add(model, settings.policy, settings.trainer.zero_stage, published_alone=alone)
    fuses, logits, packing = kernels.fuses_logits(fused), settings.trainer.logits, settings.trainer.packing
    policy = Policy(
        model, entropy_gradient=bonus, kind=kind, chunk_tokens=chunk, fused_logits=fuses, logits=logits, packing=packing
    ).train()
    try:
        place(policy, settings, device)
        _note(lead, "policy", self_test.run(policy, packing, settings.run.seed))
        engine = TrainingEngine(policy, settings, device)
        if lead is not None:
            lead.limit(engine.vocabulary, context or own_context(engine.model.config.to_dict()))
        reference: Reference | None = None
        if algorithm.needs_reference and not algorithm.reference_travels:
            if settings.policy.lora.rank:
                reference = AdapterOff(engine)
            else:
                reference = load_reference(
                    settings.policy,
                    dtype,
                    device,
                    kind=kind,
                    fused=fused,
                    chunk_tokens=chunk,
                    logits=logits,
                    context_tokens=context,
                    packing=policy.trunk.packing,
                )
        critic = None
        if algorithm.needs_critic:
            trunk, width = load_trunk(settings.policy, algorithm.critic.model, dtype, context)
            kernels.install(trunk, fused, device)
            values = Critic(trunk, width, kind=kind, packing=packing).train()
            place(values, settings, device)
            _note(lead, "critic", self_test.run(values, packing, settings.run.seed))
            critic = TrainingEngine(values, settings, device)
        Trainer(engine, settings, lead, critic, reference).run()
    finally:
        dist.destroy_process_group()


def _note(lead: "Leading | None", part: str, tested: "SelfTestResult") -> None:
    """Tell the run how the self-test of a part went."""
    if lead is None:
        return
    lead.note_self_test(part, str(tested))
    lead.notify("self-test passed", f"{part}: {tested}", **tested.figures)
    if tested.reason:
        lead.notify("sequences are not packed", f"{part}: {tested.reason}")
