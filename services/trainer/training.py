"""The training thread: load the models, join the other ranks, and train until STOP."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from penstock.services.trainer.algorithm.estimates import AdapterOff, Reference
from penstock.services.trainer.loop import Trainer
from penstock.services.trainer.model import adapter, warm_up
from penstock.services.trainer.model.critic import Critic
from penstock.services.trainer.model.engine import TrainingEngine, make_deterministic, numbered, pick_device, place
from penstock.services.trainer.model.layers import attention, kernels, ulysses
from penstock.services.trainer.model.memory.layerwise import looked_at
from penstock.services.trainer.model.policy import Policy, load_model, load_reference, load_trunk
from penstock.services.trainer.model.routing import replay
from penstock.services.trainer.rank0.artifacts import Artifacts
from penstock.services.trainer.rank0.mailbox.queues import Mailbox, NoMailbox
from penstock.services.trainer.rank0.mailbox.results import Began, ModelLoaded, SelfTested
from penstock.services.trainer.rank_group import meet_at_storage, start_ranks
from penstock.services.trainer.self_test import self_test
from penstock.shared.model.context import check_context, own_context, read_config
from penstock.shared.process.service import own_host
from penstock.shared.settings import Settings


def train(
    settings: Settings,
    mailbox: Mailbox | NoMailbox,
    artifacts: Artifacts,
    stop_requested: Callable[[], bool] = lambda: False,
) -> bool:
    """Train until STOP or FINISH; return whether the run is over. Other endings go to the mailbox."""
    try:
        mailbox.send(Began("opening the device"))
        device = _begin(settings)
        loading = Loading(settings, device, mailbox)
        engine = loading.policy()
        reference, critic = loading.reference(engine), loading.critic()
        context = settings.rollout.max_model_len or own_context(engine.model.config.to_dict())
        mailbox.send(ModelLoaded(engine.vocabulary, context))
        over = Trainer(engine, settings, mailbox, artifacts, critic, reference, stop_requested).run()
    except BaseException as error:
        mailbox.send(error)
        if dist.is_initialized() and dist.get_world_size() == 1:  # NCCL would wait for others; the launcher ends them
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()
    return over


def _begin(settings: Settings) -> str:
    if settings.run.threads:
        torch.set_num_threads(settings.run.threads)
    torch.manual_seed(settings.run.seed)
    device = pick_device(settings.run.device)
    if settings.run.deterministic != "off":
        make_deterministic(device)
    start_ranks(device, settings, own_host(settings))
    if settings.trainer.sequence_parallel > 1:
        ulysses.group_of(settings.trainer.sequence_parallel)
    return device


class Loading:
    """The models of one rank, from their folders to trained engines; collective."""

    def __init__(self, settings: Settings, device: str, mailbox: Mailbox | NoMailbox) -> None:
        self._settings = settings
        self._device = device
        self._mailbox = mailbox
        self._context = settings.rollout.max_model_len
        full = device == "cpu" or settings.policy.dtype == "float32"
        self._dtype = torch.float32 if full else torch.bfloat16

    def policy(self) -> TrainingEngine:
        settings, trainer, context = self._settings, self._settings.trainer, self._context
        self._mailbox.send(Began("loading the model"))
        config = read_config(settings.policy.model)
        check_context(settings)
        with warm_up.beside(config, trainer.kernels, self._device):
            model = load_model(settings.policy, self._dtype, context)
            self._mailbox.send(Began("compiling kernels"))
        meet_at_storage()
        kernels.install(model, trainer.kernels, self._device)
        alone = settings.publishes_adapters
        model = adapter.add(model, settings.policy, trainer.zero_stage, published_alone=alone)
        policy = Policy(
            model,
            entropy_gradient=settings.algorithm.entropy_bonus > 0,
            kind=attention.kind_of(settings.internal.attention, trainer.kernels),
            chunk_tokens=settings.internal.logits_chunk_tokens,
            fused_logits=kernels.fuses_logits(trainer.kernels),
            logits=trainer.logits,
            packing=trainer.packing,
            distils=settings.algorithm.distillation_top_k > 0,
        ).train()
        if trainer.router_replay:
            policy.trunk.replay = replay.install(policy.model)
        return self._engine("policy", policy)

    def reference(self, policy: TrainingEngine) -> Reference | None:
        """Return the reference policy, if the algorithm needs one beyond the groups' logprobs."""
        settings, trainer, algorithm = self._settings, self._settings.trainer, self._settings.algorithm
        if not algorithm.needs_reference or algorithm.reference_travels:
            return None
        if settings.policy.lora.rank:
            return AdapterOff(policy)
        self._mailbox.send(Began("loading the reference"))
        trained: Policy = policy.policy  # type: ignore[assignment]
        reference = load_reference(
            settings.policy,
            self._dtype,
            self._device,
            kind=attention.kind_of(settings.internal.attention, trainer.kernels),
            fused=trainer.kernels,
            chunk_tokens=settings.internal.logits_chunk_tokens,
            logits=trainer.logits,
            context_tokens=self._context,
            packing=trained.trunk.packing,
        )
        meet_at_storage()
        return reference

    def critic(self) -> TrainingEngine | None:
        settings, trainer = self._settings, self._settings.trainer
        if not settings.algorithm.needs_critic:
            return None
        self._mailbox.send(Began("loading the critic"))
        trunk, width = load_trunk(settings.policy, settings.algorithm.critic.model, self._dtype, self._context)
        meet_at_storage()
        kernels.install(trunk, trainer.kernels, self._device)
        return self._engine(
            "critic",
            Critic(
                trunk,
                width,
                kind=attention.kind_of(settings.internal.attention, trainer.kernels),
                packing=trainer.packing,
            ).train(),
        )

    def _engine(self, part: str, module: Policy | Critic) -> TrainingEngine:
        place(module, self._settings, self._device)
        self._mailbox.send(Began("self-test"))
        trainer = self._settings.trainer
        is_sharded = trainer.zero_stage > 0 and dist.get_world_size() > 1
        with looked_at(module, self._settings, numbered(self._device)):
            tested = self_test.run(
                module,
                trainer.packing,
                self._settings.run.seed,
                is_sharded=is_sharded,
                sequence_parallel=trainer.sequence_parallel,
            )
        self._mailbox.send(SelfTested(part, str(tested), tested.figures, tested.reason))
        self._mailbox.send(Began("building the engine"))
        return TrainingEngine(module, self._settings, self._device)
