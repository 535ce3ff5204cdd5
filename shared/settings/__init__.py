"""The settings of a run: one TOML file, then environment (``PENSTOCK__TRAINER__LEARNING_RATE``), then dotted flags.

::

    reading/          file, environment, flags ──▶ Settings ──▶ TOML, and sentences about wrong values
    root.py           Settings: all tables, what follows from several of them, what they must agree on
      run.py            [run] [bus] [data] [coordinator] [telemetry]
      policy.py         [policy] [policy.lora] [weights]
      rollout.py        [sampling] [rollout] [rollout.vllm]
      rewards/reward.py   [reward] [reward.executor]
      rewards/scorers.py  [[reward.scorers]], a class for each kind
      rewards/models.py   [reward.models], and reward models among the scorers
      algorithm.py      [algorithm], presets
      rules.py          what its rules take, [algorithm.kl] [algorithm.critic]
      trainer.py        [trainer] [trainer.store], and what of DeepSpeed's settings is ours to make
      evaluation.py     [evaluation] [evaluation.gate]
      guards.py         [guards]
      placement.py      [placement]
      internal.py       [internal], for tests and the Helm chart
    section.py        what every table has in common

What two services must agree on stands once. Loaded in ``__main__``, passed down as values; nothing else reads the
environment.
"""

from penstock.shared.settings.policy import PolicySettings
from penstock.shared.settings.reading.loading import (
    ENVIRONMENT_PREFIX,
    SETTINGS_FILE,
    dump,
    dumps,
    flat,
    given,
    given_tables,
    load,
    load_run,
    loads,
    sources,
)
from penstock.shared.settings.rollout import SamplingSettings
from penstock.shared.settings.root import Settings
from penstock.shared.settings.run import BusSettings, DataSettings, RunKind
from penstock.shared.settings.trainer import TrainerSettings

__all__ = [
    "ENVIRONMENT_PREFIX",
    "SETTINGS_FILE",
    "BusSettings",
    "DataSettings",
    "PolicySettings",
    "RunKind",
    "SamplingSettings",
    "Settings",
    "TrainerSettings",
    "dump",
    "dumps",
    "flat",
    "given",
    "given_tables",
    "load",
    "load_run",
    "loads",
    "sources",
]
