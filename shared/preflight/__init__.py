"""Checks of a node and a cluster before a model is loaded; each failure is one sentence with its fix.

``python -m penstock.shared.preflight`` runs them in a pod of the chart, `penstock doctor` on this machine or in a release.
"""
