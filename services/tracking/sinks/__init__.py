"""Sinks: one module for each tracker; only it imports the tracker's library."""
