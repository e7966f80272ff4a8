"""The rollout service: takes leases, runs episodes, records and scores them.

When does the service ask for leases?               service.py      _lease
When is a version served?                           policy_host.py  _update_live
What becomes of an episode that raises?             runner.py       run
Which tokens are trained?                           recorder.py     record
What does a policy see of a conversation?           renderer.py     render
"""
