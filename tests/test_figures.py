"""Laws of figures in the documents: each of speed or accuracy is that of a results file."""

import json
import re
from pathlib import Path

import pytest

from tests.test_docs import EXAMPLES, PAGES, ROOT, name_of, prose

CITED = re.compile(r'\[([\d.,]+)(k?)\]\(([^)\s]*results/[^)\s]+\.json)\s"([^"]+)"\)')
"""A figure, the file that it is from, and the place of its value there, as keys and indices."""


def cited(page: Path, text: str) -> list[tuple[str, float, float]]:
    """Return each figure that ``text`` cites as written, with the value in its file, and half of its last digit."""
    figures = []
    for written, thousands, file, place in CITED.findall(text):
        value = json.loads((page.parent / file).read_text(encoding="utf-8"))
        for key in " ".join(place.split()).split("/"):
            value = value[int(key)] if isinstance(value, list) else value[key]
        value /= 1000 if thousands else 1
        digits = len(written.partition(".")[2])
        figures.append((written, float(value), 0.5 * 10.0**-digits))
    return figures


@pytest.mark.parametrize("page", [*PAGES, *EXAMPLES], ids=name_of)
def test_a_cited_figure_is_that_of_its_file(page: Path) -> None:
    for written, value, half in cited(page, page.read_text(encoding="utf-8")):
        assert abs(float(written.replace(",", "")) - value) <= half * 1.001, f"{page}: {written} is {value} in its file"


def test_each_row_of_the_readme_s_results_cites_its_figures_and_their_ratio() -> None:
    results = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Results")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in results.splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 5
    for _, peer, own, ratio in rows:
        ((_, value, _),) = cited(ROOT / "README.md", own)
        if peer.strip() == "–":
            continue
        ((_, of_peer, _),) = cited(ROOT / "README.md", peer)
        written = ratio.strip().removesuffix("×")
        half = 0.5 * 10.0 ** -len(written.partition(".")[2])
        assert abs(float(written) - value / of_peer) <= half, (written, value / of_peer)


RATES = r"tokens/s|samples/s|groups/s|ms(?!\w)|times as (?:fast|long|many|accurate)|× the|nats"
MEASURED = re.compile(
    rf"(?<!every )(?<![\w.])\d(?:[\d.,]*\d)?k? (?:{RATES})|(?<!with )(?:MFU|accuracy|probability) (?:(?:of|is|was|from|at) )?\d"
)
"""Figures of speed and of accuracy, not of limits: those are seconds, or among ``LIMITS``."""
LIMITS = (
    "bounded at 20 nats",
    "From 10 nats",
    "at 12 nats",
    "below 0.002 nats",
    "of 4 nats",
    "1 times as many",
    "an accuracy of 0.9,",
)


@pytest.mark.parametrize("page", [page for page in (*PAGES, *EXAMPLES) if page.name != "index.md"], ids=name_of)
def test_a_figure_of_speed_or_accuracy_cites_its_file(page: Path) -> None:
    assert uncited("\n".join(prose(page))) == []


def uncited(text: str) -> list[str]:
    """Return the figures in ``text`` that link to no value of a file, each with the words around it."""
    text = " ".join(CITED.sub("", text).split())
    for limit in LIMITS:
        text = text.replace(limit, "")
    return [text[max(0, hit.start() - 40) : hit.end() + 10] for hit in MEASURED.finditer(text)]


def test_an_uncited_figure_is_noticed() -> None:
    place = '(../benchmarks/results/2026-11-27-one-gpu-h200.json "samples_per_s/at once")'
    assert uncited(f"it makes [97.8]{place}\nsamples/s, polled every 30 ms") == []
    for figure in ("1,782 samples/s", "52.6k tokens/s", "an MFU of 0.5", "12 ms", "1.2 times as fast", "accuracy 0.98"):
        assert len(uncited(f"it has {figure} now")) == 1, figure


def test_the_table_of_presets_is_that_of_its_file() -> None:
    """The largest distance of a preset's mean over seeds from the best of all, over tasks and lags."""
    samples: dict[tuple[str, str, int], list[float]] = {}
    for cell in json.loads((ROOT / "benchmarks/results/2026-11-27-staleness-h100.json").read_text())["cells"]:
        samples.setdefault((cell["variant"], cell["task"], cell["lag"]), []).append(cell["after"])
    means = {key: sum(after) / len(after) for key, after in samples.items()}
    best = {key[1:]: max(mean for other, mean in means.items() if other[1:] == key[1:]) for key in means}
    page = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8").partition("### Every preset at lags")[2]
    heads, _, figures = [line.strip("| ").split("|") for line in page.splitlines() if line.startswith("|")][:3]
    assert len(heads) > 10
    for head, figure in zip(heads, figures, strict=True):
        presets = re.findall(r"`(\w+)`", head)
        distance = max(best[key[1:]] - mean for key, mean in means.items() if key[0] in presets)
        assert float(figure) == pytest.approx(distance, abs=0.005), head
