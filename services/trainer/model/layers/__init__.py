"""Layers that respect sequence boundaries in packed rows."""
