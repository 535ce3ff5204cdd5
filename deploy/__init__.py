"""What deploys Penstock: images, the chart, dashboards and alert rules."""
