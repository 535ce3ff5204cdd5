"""The probe's texts before the first batch: prompts of the run's data."""

from pathlib import Path

from penstock.services.trainer.rank0.first_texts import first_texts
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.stores.experience.rehearsal import offer
from penstock.shared.settings import loads
from tests.support import builders, tiny


async def test_the_first_texts_are_prompts_of_the_data_as_replicas_encode_them(bus: Bus, tmp_path: Path) -> None:
    tiny.save(tmp_path / "model")
    settings = loads(f"policy.model = '{tmp_path / 'model'}'", "test")
    assert await first_texts(bus, settings, tiny.VOCABULARY) == (), "the coordinator has not offered any yet"
    await offer(bus, [builders.prompt(text="12+34="), builders.prompt(text="5+6=")])
    places = {character: place + 2 for place, character in enumerate(tiny.CHARACTERS)}
    expected = [[places[character] for character in text] for text in ("12+34=", "5+6=")]
    assert [text.tolist() for text in await first_texts(bus, settings, tiny.VOCABULARY)] == expected


async def test_a_run_without_a_tokenizer_or_with_prompts_that_it_cannot_read_has_none(bus: Bus, tmp_path: Path) -> None:
    await offer(bus, [builders.prompt(text="12+34=")])
    assert await first_texts(bus, loads(f"policy.model = '{tmp_path}'", "test"), tiny.VOCABULARY) == ()
    tiny.save(tmp_path / "model")
    assert await first_texts(bus, loads(f"policy.model = '{tmp_path / 'model'}'", "test"), vocabulary=3) == ()
