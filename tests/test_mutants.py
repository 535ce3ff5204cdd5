"""The laws that `make mutants` breaks are where its table says, and so are their tests."""

import pytest

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.client import lua
from tests.support.mutants import ROOT, mutants, mutated
from tests.support.raw_redis import raw


@pytest.mark.parametrize("name", mutants())
def test_a_mutant_can_be_made_and_has_tests(name: str) -> None:
    mutant = mutants()[name]
    assert mutated(mutant) != (ROOT / mutant["file"]).read_text(encoding="utf-8")
    for test in mutant["tests"].split():
        path, _, function = test.partition("::")
        assert f"def {function}" in (ROOT / path).read_text(encoding="utf-8"), test


async def test_a_mutant_of_a_script_can_be_read_and_loaded(bus: Bus) -> None:
    """Else its tests fail whatever law it breaks."""
    for mutant in mutants().values():
        if (file := ROOT / mutant["file"]).suffix == ".lua":
            await raw(bus).script_load(lua.parse(file.stem, mutated(mutant)).text)
