"""Penstock beside other systems."""
