"""``penstock sft``: a run's settings as those of a supervised run over its demonstrations or preference pairs.

``python -m penstock.services.cli.supervised CONFIG FLAGS`` prints how many rows such a run trains.
"""

import logging
import math
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.services.up import prepare
from penstock.services.up.display import console
from penstock.shared.errors import PenstockError, SettingsError
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
    flags = as_supervised(config, flags)
    if epochs is not None and not 0 < epochs < math.inf:
        raise SettingsError(
            f"expected more than 0 passes over the data, but not endless ones, found {epochs:g}: change --epochs"
        )
    if epochs is not None:
        each = load(config, flags).algorithm.groups_per_step
        flags = [*flags, f"--run.steps={max(1, math.ceil(epochs * _counted(config, flags) / each))}"]
    return prepare.prepare(config, None, flags)


def as_supervised(config: Path | None, flags: Sequence[str]) -> list[str]:
    """Return ``flags`` with those that make the run one over demonstrations or, if its rows are, preference pairs."""
    has_pairs = is_given("data.rejected_field", config, flags)
    rule = "--algorithm.preset=dpo" if has_pairs else "--algorithm.loss=cross_entropy"
    return [*flags, rule, "--algorithm.clip=[0.2, 0.2]"]  # the file's is of its run with rewards


def _counted(config: Path, flags: Sequence[str]) -> int:
    """Return the rows that the run trains, counted by another process: this one lasts as long as the run, and would keep
    the libraries that read them."""
    command = [sys.executable, "-m", "penstock.services.cli.supervised", str(config), *flags]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if not done.returncode:
        return int(done.stdout.split()[-1])
    said = done.stdout.strip() or f"could not count the rows of data.path: the process ended with {done.returncode}"
    raise SettingsError(said) if done.returncode == 2 else PenstockError(said)


def _count(config: Path, flags: Sequence[str]) -> int:
    """Print :func:`_counted`, or why not; return the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C, which the command answers
    from penstock.services.coordinator.data import load_data

    logging.getLogger("penstock.services.coordinator").addHandler(logging.NullHandler())  # the run reports its bad rows
    try:
        console.say(str(len(load_data(load(config, flags)).train)))
    except PenstockError as error:
        console.say(str(error))
        return 2 if isinstance(error, SettingsError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(_count(Path(sys.argv[1]), sys.argv[2:]))
