"""The rollout service: takes leases, runs episodes, records and scores them."""
