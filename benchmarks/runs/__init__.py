"""Whole runs of Penstock."""
