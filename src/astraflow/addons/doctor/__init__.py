"""`astraflow doctor`: is this machine, and this recipe, fit for a run?"""
