"""`astraflow plan`: forecasts throughput, staleness and cost of a pool of rollout services."""
