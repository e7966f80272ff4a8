"""What several tests share. Each module's docstring says what it offers; the name says of which kind it is:

- `*_driver`: starts a part of AstraFlow as its users do, and acts on it.
- `*_fakes`, `*_examples`, `*_engines`, `*_games`, `*_tasks`: environments, engines, and trackers for tests.
- `*_builders`, `*_runs`, `*_rows`, `*_models`: tasks, recipes, data, and models.
- `hostile_*`, `bad_*`, `slow_*`, `small_*`, `faulty_*`, `planted_*`: attacks, bad networks, full disks, bugs.

A process that a test starts imports them as `drivers.NAME`; `tests` has to be on its module path.
"""
