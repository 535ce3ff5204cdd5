"""Choose training rows by a condition on their columns (``data.filter``)."""

from collections.abc import Mapping

from penstock.services.coordinator.admission.dataset_files import BadRow
from penstock.shared.expression import Condition

CHARACTERS = "prompt_characters"


class RowFilter:
    def __init__(self, text: str) -> None:
        self._condition = Condition(text, "data.filter") if text else None

    def keeps(self, row: Mapping[str, object], characters: int) -> bool:
        if self._condition is None:
            return True
        values = {name: value for name, value in row.items() if isinstance(value, (bool, int, float, str))}
        try:
            return self._condition({**values, CHARACTERS: characters})
        except KeyError as error:
            raise BadRow(
                f"expected a number or text in {error.args[0]!r}, as data.filter needs it, found none"
            ) from error
        except (TypeError, ArithmeticError) as error:
            raise BadRow(f"expected values that fit data.filter, found others: {error}") from error
