"""``penstock sft``: a run's settings as those of a supervised run over its demonstrations or preference pairs."""

import logging
import math
from collections.abc import Sequence
from pathlib import Path

from penstock.services.coordinator.service import load_data
from penstock.services.up import prepare
from penstock.shared.errors import SettingsError
from penstock.shared.settings import load
from penstock.shared.settings.reading.loading import is_given


def prepared(config: Path | None, flags: Sequence[str], epochs: float | None) -> prepare.Prepared:
    """Return the run, ready to start; ``epochs`` passes over the training data set its steps.

    Raises:
        SettingsError: names the setting to change.
    """
    if config is None:
        raise SettingsError(
            "the settings file is missing: penstock sft my-run.toml; continue one by penstock up --resume"
        )
    has_pairs = is_given("data.rejected_field", config, flags)
    rule = "--algorithm.preset=dpo" if has_pairs else "--algorithm.loss=cross_entropy"
    flags = [*flags, rule, "--algorithm.clip=[0.2, 0.2]"]  # the file's is of its run with rewards
    if epochs is not None:
        settings = load(config, flags)
        logging.getLogger("penstock.services.coordinator").addHandler(
            logging.NullHandler()
        )  # the run reports its bad rows
        rows = len(load_data(settings).train)
        flags = [*flags, f"--run.steps={max(1, math.ceil(epochs * rows / settings.algorithm.groups_per_step))}"]
    return prepare.prepare(config, None, flags)
