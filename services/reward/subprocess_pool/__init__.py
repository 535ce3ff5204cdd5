"""Killable processes for work whose time nobody can bound: each answers one question at a time."""
