"""The processes of a run: the main function of each, the local launcher, and the supervisor."""
