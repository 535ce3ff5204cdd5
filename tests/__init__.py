"""Tests, named as laws."""
