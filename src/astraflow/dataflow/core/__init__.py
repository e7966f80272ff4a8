"""The dataflow's state machine: every decision, without sockets, tasks or a clock.

Which task is drawn next, and for which policies?   groups.py      draw
May this service lease an episode?                  leases.py      issue
Is a group complete?                                groups.py      record_result
What is this episode's advantage?                   valuation.py   value
Which groups make the next batch?                   tables.py      take_batch
How did a group end?                                fates.py       decide_fate
Does a version count as published, a step as done?  policies.py    publish, commit
"""
