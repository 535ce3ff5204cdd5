"""Start one rollout replica: ``python -m services.rollout --config run.toml --replica rollout-0``."""

import asyncio
import sys

from services.rollout.engine import Engine
from services.rollout.prompts import CharacterCodec, Codec, TokenizerCodec
from services.rollout.service import Rollout
from shared import service
from shared.settings import Settings


async def open_engine(settings: Settings, replica: str) -> tuple[Engine, Codec]:
    """Return the engine of ``rollout.engine`` and the codec of its vocabulary; heartbeats go on while a model loads.

    Raises:
        SettingsError: there is no such model or device.
    """
    if settings.rollout.engine == "scripted":
        from services.rollout.scripted_engine import ScriptedEngine

        return ScriptedEngine(seed=settings.run.seed), CharacterCodec()
    from services.rollout.models import open_model, open_tokenizer
    from services.rollout.transformers_engine import TransformersEngine, seed_of, try_out

    tokenizer = await asyncio.to_thread(open_tokenizer, settings.policy)
    opened = await asyncio.to_thread(open_model, settings.policy, tokenizer, settings.rollout.device)
    await asyncio.to_thread(try_out, opened)
    engine = TransformersEngine(
        opened,
        seed=seed_of(settings.run.seed, replica),
        max_rows=settings.rollout.max_groups * settings.sampling.group_size,
        threads=settings.rollout.threads,
    )
    return engine, TokenizerCodec(tokenizer, opened)


async def run(settings: Settings, replica: str) -> None:
    """Serve until SIGTERM."""
    async with service.serve(settings, "rollout", replica, settings.rollout.metrics_port) as context:
        engine, codec = await open_engine(settings, replica)
        rollout = Rollout(
            context.bus,
            engine,
            codec,
            context.status,
            replica=replica,
            patience=context.patience,
            max_groups=settings.rollout.max_groups,
            group_size=settings.sampling.group_size,
        )
        await rollout.run(context.stop, settings.telemetry.heartbeat_s)


if __name__ == "__main__":
    sys.exit(service.main("rollout", run))
