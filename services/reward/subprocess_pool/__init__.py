"""Killable processes for work of unbounded duration."""
