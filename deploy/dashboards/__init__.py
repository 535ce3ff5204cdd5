"""Grafana dashboards, written as tables in Python and checked in as JSON where the chart finds them: ``make dashboards``."""
