"""`exact: true`: engine and trainer compute a token's logprob to the same bit, on CPUs."""
