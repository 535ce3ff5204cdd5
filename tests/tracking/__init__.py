"""Tests of the tracking service."""
