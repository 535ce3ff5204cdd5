"""The settings of checkpoints in object storage, ``[trainer.store]``.

Credentials are no settings: they come from where AWS's own tools look for them (environment, profile, role of the pod or machine).
"""

from typing import Literal

from pydantic import Field, PositiveInt

from shared.section import Section


class StoreSettings(Section):
    """Where checkpoints are copied to beside training, for folders that do not outlive their machine."""

    uri: str = Field(default="", pattern=r"^$|^s3://[^/@]+(/.*)?$")
    """`s3://bucket/prefix`, in S3 or in what speaks its protocol; `<prefix>/<run id>/` is this run's. Empty: none."""
    endpoint: str = Field(default="", pattern=r"^$|^https?://[^@]+$")
    """URL of a server that is not AWS's; empty: as AWS's own tools find it."""
    region: str = Field(default="")
    """Region of the bucket; empty: as AWS's own tools find it."""
    keep_last: PositiveInt = Field(default=2)
    """Checkpoints that are kept there, besides pinned ones. From 2 on, the journal reaches back to the last but one, so that
    a damaged newest one costs no step."""
    counts: Literal["stored", "written"] = Field(default="stored")
    """From when on a checkpoint may be relied upon, and the journal before it goes: once it is whole in the store, or as soon
    as it is `written` to the run's folder, which must then outlive the machine, as a shared volume does."""
