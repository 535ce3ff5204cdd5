"""Deployment: images, Helm chart, dashboards and alert rules."""
