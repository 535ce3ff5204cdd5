"""The run's datasets: loaded, doubted and put in order."""

import dataclasses
from collections.abc import Iterator, Sequence

from penstock.services.coordinator.admission import dataset
from penstock.services.coordinator.admission.curriculum import Curriculum
from penstock.services.coordinator.admission.data_overlap import Training
from penstock.services.coordinator.admission.demonstrations import Demonstrations
from penstock.services.coordinator.admission.mixing import EpochOrder, MixedOrder
from penstock.services.coordinator.run.notices import notice
from penstock.services.coordinator.schemas.run import NoticeView
from penstock.shared.errors import SettingsError
from penstock.shared.settings import RunKind, Settings
from penstock.shared.settings.evaluation import HeldOutSet
from penstock.shared.settings.rewards.scorers import AnswerScorer


@dataclasses.dataclass(frozen=True, slots=True)
class Data:
    train: dataset.Dataset
    held_out: tuple[tuple[HeldOutSet, dataset.Dataset], ...]
    notices: tuple[NoticeView, ...] = ()


def load_data(settings: Settings) -> Data:
    """Load the datasets. Raises SettingsError: one is unusable."""
    evaluation, scorers = settings.evaluation, settings.reward.scorers
    names = [scorer.name for scorer in scorers]
    comparing = [scorer for scorer in scorers if isinstance(scorer, AnswerScorer)]
    demonstrations = None
    if not settings.kind.generates:
        demonstrations, comparing = Demonstrations(settings), []
    completed = Demonstrations(settings) if settings.kind is RunKind.MIXTURE else demonstrations
    teachers = [of.name for of in settings.reward.teachers]
    train = dataset.load_training(settings.data, names, comparing, completed, teachers)
    _check_sampling(settings, train)
    held_out = tuple(
        (
            held_set,
            dataset.load(
                held_set.path, settings.data, evaluation.setting_of(held_set), names, comparing, "", demonstrations
            ),
        )
        for held_set in evaluation.held_out
    )
    return Data(train, held_out, tuple(_doubts(settings, train, held_out)))


def _check_sampling(settings: Settings, train: dataset.Dataset) -> None:
    ends = [sum(train.sizes[: place + 1]) for place in range(len(train.sizes))]
    for source, end in zip(settings.data.sources, ends, strict=False):
        if source in settings.sampling.by_dataset and train.problems[end - 1].demonstration is not None:
            raise SettingsError(
                f"expected datasets of problems in sampling.by_dataset, found {source!r}, whose rows are demonstrations: leave it out"
            )


def _doubts(
    settings: Settings, train: dataset.Dataset, held_out: Sequence[tuple[HeldOutSet, dataset.Dataset]]
) -> Iterator[NoticeView]:
    if train.bad_rows:
        text = (
            f"{train.bad_rows} rows of {', '.join(settings.data.sources)} cannot be used, the first {train.bad[0]}; "
            "`penstock data check` names all"
        )
        yield notice("bad rows", "warning", text)
    prompts = Training(train.problems) if held_out else None
    for held_set, problems in held_out:
        assert prompts is not None
        overlap = prompts.overlap(held_set.name, problems.problems)
        if overlap.exact or overlap.similar:
            sentence = overlap.sentence(settings.evaluation.setting_of(held_set))
            yield notice(f"held-out data {held_set.name}", "warning", sentence)


def order_of(settings: Settings, train: dataset.Dataset) -> EpochOrder | MixedOrder | Curriculum:
    """Return the order of the training problems. Raises SettingsError."""
    data, seed = settings.data, settings.run.seed
    order: EpochOrder | MixedOrder = EpochOrder(len(train), seed, shuffle=data.shuffle)
    if train.sizes:
        order = MixedOrder(train.sizes, list(data.sources.values()), seed, shuffle=data.shuffle)
    return Curriculum(train, order, seed) if data.curriculum else order
