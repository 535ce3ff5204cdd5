"""What a run trains: the one answer for every service that asks."""

import enum


class RunKind(enum.Enum):
    """The value says what groups are for, as a prompt's purpose does."""

    SAMPLES = ("train",)
    MIXTURE = ("train", "demonstrate")
    DEMONSTRATIONS = ("demonstrate",)
    PAIRS = ("demonstrate", "pairs")
    """Preference pairs of the data, and not prompts whose samples become some."""

    @property
    def generates(self) -> bool:
        """Whether replicas generate, and reward services score."""
        return "train" in self.value

    @property
    def purposes(self) -> tuple[str, ...]:
        """What the groups of a batch are for."""
        return tuple(purpose for purpose in self.value if purpose != "pairs")
