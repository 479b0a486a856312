"""Statistics, verdicts, trends, forecasts: what finished runs support."""
