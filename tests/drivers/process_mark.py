"""The variable that marks the processes of a test: see `drivers.left_over`."""

MARK = "ASTRAFLOW_TEST_PROCESS"
"""Environment variable; its value is the test's own, of 16 characters."""
FOLDER = "ASTRAFLOW_TEST_FOLDER"
"""Environment variable in an order to `drivers.warm_server`: the folder in which the program runs."""
