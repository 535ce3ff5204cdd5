"""Every tiny configuration equals the unmodified model, or is refused with a sentence."""

import re

import pytest

from tests.support import model_page, model_zoo

pytestmark = pytest.mark.usefixtures("one_thread")

VERDICTS = model_page.verdicts()


def test_the_table_has_every_configuration_once() -> None:
    listed = [*VERDICTS.rows, *VERDICTS.sequences, *VERDICTS.refused]
    assert sorted(listed) == sorted(model_zoo.CONFIGURATIONS)


def test_the_page_is_the_tables() -> None:
    assert model_page.PAGE.read_text() == model_page.text(VERDICTS), "run `make models`"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(model_zoo.CONFIGURATIONS))
def test_a_model_is_right_or_refused(name: str) -> None:
    verdict = model_zoo.check(name)
    if name in VERDICTS.refused:
        assert verdict.kind == "refused", verdict
        assert VERDICTS.refused[name] in verdict.sentence
        assert re.search(r"change [a-z_.]+|install", verdict.sentence)
    else:
        expected = "rows" if name in VERDICTS.rows else "sequences"
        assert verdict.kind == expected, verdict
        assert verdict.one_rank is (name in VERDICTS.one_rank), verdict
