"""The laws that `make mutants` breaks are where its table says, and so are their tests."""

import pytest

from tests.support.mutants import ROOT, mutants, mutated


@pytest.mark.parametrize("name", mutants())
def test_a_mutant_can_be_made_and_has_tests(name: str) -> None:
    mutant = mutants()[name]
    assert mutated(mutant) != (ROOT / mutant["file"]).read_text(encoding="utf-8")
    for test in mutant["tests"].split():
        path, _, name = test.partition("::")
        assert f"def {name}" in (ROOT / path).read_text(encoding="utf-8"), test
