"""Prompts of the run's data as token ids, for the probe of versions before the first batch."""

import asyncio
import logging

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import Int32Array
from penstock.shared.bus.stores.experience.rehearsal import offered
from penstock.shared.errors import PermanentError, SettingsError
from penstock.shared.settings import Settings

log = logging.getLogger(__name__)


async def first_texts(bus: Bus, settings: Settings, vocabulary: int) -> tuple[Int32Array, ...]:
    """Return the prompts that the coordinator offers for trials, as replicas encode them; none if it has not offered any
    yet, or the model has no tokenizer.
    """
    prompts = await offered(bus)
    if not prompts:
        return ()
    from penstock.shared.model.tokenizer import Limits, TokenizerCodec, open_tokenizer

    texts = []
    try:
        tokenizer = await asyncio.to_thread(open_tokenizer, settings.policy)
        codec = TokenizerCodec(tokenizer, Limits(vocabulary=vocabulary), settings.data.chat_template)
        for prompt in prompts:
            texts.append(codec.encode(prompt))
    except (SettingsError, PermanentError) as error:
        log.info("the first version has no probe of the prompts", extra={"detail": str(error)})
    return tuple(texts)
