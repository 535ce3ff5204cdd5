"""Dead letters as JSON."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import Experience, Json, PolicyRecord, Prompt, RolloutGroup
from penstock.shared.bus.stores.experience.dead_letters import DeadLetter, DeadLetterSource
from penstock.shared.errors import MessageError, ShelfLost

_SHOWN_ELEMENTS = 256
_KINDS: dict[DeadLetterSource, type[Any]] = {
    DeadLetterSource.PROMPTS: Prompt,
    DeadLetterSource.EPISODES: Prompt,
    DeadLetterSource.ROLLOUTS: RolloutGroup,
    DeadLetterSource.EXPERIENCE: Experience,
    DeadLetterSource.EVAL_PROMPTS: Prompt,
    DeadLetterSource.EVAL_EPISODES: Prompt,
    DeadLetterSource.EVAL_ROLLOUTS: RolloutGroup,
    DeadLetterSource.EVAL_RESULTS: Experience,
    DeadLetterSource.PUBLISHED: PolicyRecord,
}


async def decode(bus: Bus, letter: DeadLetter) -> tuple[Json, str]:
    """JSON, with arrays cut after 256 elements, and any error."""
    try:
        return _shown(wire.decode(await bus.whole(letter.data), _KINDS[letter.stream])), ""
    except (MessageError, ShelfLost) as error:
        return None, str(error)


def _shown(value: object) -> Json:
    if dataclasses.is_dataclass(value):
        return {field.name: _shown(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, np.ndarray):
        elements = np.nan_to_num(value.reshape(-1)[:_SHOWN_ELEMENTS]).tolist()
        return {"shape": list(value.shape), "elements": elements}
    if isinstance(value, Mapping):
        return {str(name): _shown(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_shown(part) for part in value]
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return re.sub(r"\s+", " ", repr(value))
