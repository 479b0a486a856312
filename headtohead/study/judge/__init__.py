"""Statistics, verdicts, trends and forecasts from finished runs."""
