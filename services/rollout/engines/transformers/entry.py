"""How a replica opens a model of transformers."""

import asyncio
import dataclasses

from penstock.services.rollout.engines.engine import Engine
from penstock.services.rollout.engines.opening import Opening
from penstock.services.rollout.engines.prompts import Codec
from penstock.shared.model.tokenizer import TokenizerCodec
from penstock.shared.process.importing import importing


async def load() -> None:
    """Import torch and transformers."""
    await asyncio.to_thread(_load)


def _load() -> None:
    with importing():
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

        import penstock.services.rollout.engines.transformers.engine  # noqa: F401


async def open_engine(opening: Opening) -> tuple[Engine, Codec]:
    """Return the engine of a model that was tried out."""
    from penstock.services.rollout.engines.transformers.engine import TransformersEngine
    from penstock.services.rollout.engines.transformers.loading import open_model
    from penstock.services.rollout.engines.transformers.routes import RouteRecorder
    from penstock.services.rollout.engines.transformers.smoke_test import try_out
    from penstock.shared.model.tokenizer import check_stop_texts, open_tokenizer

    settings = opening.settings
    tokenizer = await asyncio.to_thread(open_tokenizer, settings.policy)
    check_stop_texts(tokenizer, settings.sampling, settings.reward.markers)
    context = settings.rollout.max_model_len
    opened = await asyncio.to_thread(open_model, settings.policy, tokenizer, settings.run.device, context)
    await asyncio.to_thread(try_out, opened)
    if settings.trainer.router_replay:
        opened = dataclasses.replace(opened, recorder=RouteRecorder(opened.model))
    engine = TransformersEngine(
        opened,
        max_rows=settings.rollout.max_groups * settings.sampling.group_size,
        alone=settings.run.deterministic == "run",
        threads=settings.run.threads,
        host=opening.host if settings.weights.transport == "pull" else "",
        secret=opening.secret,
        deadline_s=settings.weights.deadline_s,
        drain=settings.weights.update == "drain",
    )
    return engine, TokenizerCodec(tokenizer, opened, settings.data.chat_template, settings.reward)
