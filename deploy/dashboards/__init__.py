"""Grafana dashboards, committed as JSON in the chart: ``make dashboards``."""
