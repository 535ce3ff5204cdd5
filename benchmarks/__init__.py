"""Benchmarks: each compares within one run and prints one JSON object on its last line."""
