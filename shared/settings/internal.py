"""The ``[internal]`` table: times and limits that tests shorten. Not supported in a run of your own."""

from pydantic import Field, PositiveInt

from shared.settings.section import Section


class InternalSettings(Section):
    """For tests; not supported, and not listed by `penstock settings`."""

    starving_window_s: PositiveInt = Field(default=60)
    """Seconds that the guard `rollouts_starving` examines, with one look at the streams in each."""
