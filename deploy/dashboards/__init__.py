"""Grafana dashboards, defined in Python and committed as JSON in the chart: ``make dashboards``."""
