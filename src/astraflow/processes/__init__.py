"""The processes of a run: the main function of each, the local launcher, and the supervisor.

Which processes does a run have?                    program.py      program
Is a process restarted?                             supervisor.py   _wait_for_restart
"""
