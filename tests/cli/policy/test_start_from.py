"""A run that begins with another run's checkpoint."""

import asyncio
from pathlib import Path

import pytest
import torch

from penstock.services.cli.__main__ import main
from penstock.services.cli.policy.start_from import prepared_from
from penstock.services.trainer.algorithm.update import Learner
from penstock.services.trainer.checkpoint import local_store
from penstock.services.trainer.model.engine import TrainingEngine
from penstock.services.trainer.model.policy import Policy, load_model
from penstock.services.trainer.phases import Phases
from penstock.services.trainer.rank0.mailbox.commands import Command, CommandKind
from penstock.shared.bus.bus import Bus
from penstock.shared.errors import SettingsError
from penstock.shared.settings import Settings
from tests.trainer.algorithm import test_update
from tests.trainer.export.test_export import Run
from tests.trainer.rank0.test_opening import Opened

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def source(tmp_path: Path) -> Run:
    """A run with a checkpoint of step 1."""
    run = Run(tmp_path / "source", 1, 0)
    run.checkpoint()
    return run


@pytest.fixture
def config(tmp_path: Path, source: Run) -> Path:
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    path = tmp_path / "run.toml"
    path.write_text(
        f"""
        run = {{ id = "second", folder = "{tmp_path}/runs", device = "cpu" }}
        policy = {{ model = "{source.settings.policy.model}", dtype = "float32" }}
        data.path = "{tmp_path}/train.jsonl"
        sampling.max_new_tokens = 8
        algorithm.groups_per_step = 4
        trainer.learning_rate = 1e-2
        """
    )
    return path


def engine(settings: Settings) -> TrainingEngine:
    model = load_model(settings.policy, torch.float32)
    return TrainingEngine(Policy(model).train(), settings, "cpu")


def learned(of: TrainingEngine, settings: Settings) -> dict[str, torch.Tensor]:
    Learner(of, settings, Phases()).learn(test_update.batch(), test_update.lags(test_update.batch(), 0), 2)
    return {name: tensor.clone() for name, tensor in of.tensors()}


@pytest.mark.filterwarnings("ignore")
def test_with_its_optimizer_a_run_makes_the_step_that_the_other_would_have_made(source: Run, config: Path) -> None:
    prepared = prepared_from(config, None, [], str(source.settings.run_folder), optimizer=True)
    prepared.lock.close()
    begun = engine(prepared.settings)
    assert Path(prepared.settings.policy.model) == prepared.folder / "initial"
    published = source.published()
    assert all(torch.equal(tensor, published[name]) for name, tensor in begun.tensors())
    alone = learned(engine(prepared.settings), prepared.settings)
    begun.load(prepared.folder / local_store.START / "engine")
    continued = learned(source.engine, source.settings)
    made = learned(begun, prepared.settings)
    assert all(torch.equal(tensor, continued[name]) for name, tensor in made.items())
    assert not all(torch.equal(tensor, continued[name]) for name, tensor in alone.items()), "the optimizer matters"


async def test_the_trainer_loads_it_before_the_first_step_and_not_over_a_checkpoint_of_its_own(
    bus: Bus, tmp_path: Path, source: Run
) -> None:
    opened = Opened(bus, tmp_path / "runs")
    start = opened.of.run_folder / local_store.START
    opened.of.run_folder.mkdir(parents=True)
    await asyncio.to_thread(source.checkpoint().rename, start)
    await opened.ledger.create()
    assert await opened.opening.find() == [Command(CommandKind.LOAD, folder=str(start))]
    assert opened.opening.loaded is None, "the run is at step 0"
    (start / "state.json").write_text("{")
    with pytest.raises(SettingsError, match="is damaged"):
        await opened.opening.find()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["CONFIG", "--from", "RUN@7"], "there is no checkpoint of step 7 in"),
        (["CONFIG", "--from", "RUN@7"], "it has those of 1; change --from"),
        (["CONFIG", "--from", "nowhere"], "no run's folder or settings file at nowhere"),
        (["CONFIG", "--optimizer"], "expected CONFIG --from RUN[@STEP]"),
        (["--resume", "RUN", "--from", "RUN"], "--from begins a new run"),
        (
            ["CONFIG", "--from", "RUN", "--optimizer", "--trainer.offload=optimizer"],
            "expected trainer.offload = 'none', as in",
        ),
        (["CONFIG", "--from", "RUN", "--optimizer", "--policy.lora.rank=4"], "expected policy.lora = {}, as in"),
        (["CONFIG", "--from", "RUN", "--data.path", "none.jsonl"], "change data.path"),
    ],
)
def test_what_does_not_fit_is_refused_and_leaves_no_folder(
    source: Run, config: Path, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = {"CONFIG": str(config), "RUN": str(source.settings.run_folder), "RUN@7": f"{source.settings.run_folder}@7"}
    assert main(["up", *(place.get(word, word) for word in words)]) == 2
    assert sentence in capsys.readouterr().err
    assert not (config.parent / "runs" / "second").exists()
