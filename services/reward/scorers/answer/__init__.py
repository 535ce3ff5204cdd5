"""The answer matcher.

completion ──▶ extraction ──▶ matching: attempts, the strictest first ──▶ mathematics
                                 ▲
        notation, relations, shapes, units, words, prose
"""
