"""Let the LaTeX parser behind ``math-verify`` try SLL prediction before LL, where it spends most of its time.

SLL either parses as LL does or fails (Parr, Harwell, Fisher 2014, "Adaptive LL(*) Parsing", §3.2). Patches a private
class of ``latex2sympy2_extended``, if it exists.
"""

from typing import Any


def predict_quickly() -> None:
    try:
        from antlr4.atn.PredictionMode import PredictionMode
        from latex2sympy2_extended import latex2sympy2

        kind: Any = latex2sympy2._Latex2Sympy
        create, parse = kind.create_parser, kind.parse
    except (ImportError, AttributeError):
        return

    def create_quick(self: Any, text: str) -> Any:
        parser = create(self, text)
        if getattr(self, "is_quick", False):
            parser._interp.predictionMode = PredictionMode.SLL
        return parser

    def parse_quick_first(self: Any, text: str) -> Any:
        self.is_quick = True
        try:
            return parse(self, text)
        except Exception:  # noqa: BLE001 (whatever it was, LL has the last word)
            self.is_quick = False
            return parse(self, text)

    kind.create_parser, kind.parse = create_quick, parse_quick_first
