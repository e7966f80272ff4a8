"""Programs as answers: the reward `code_tests` and the workflow `code_and_test`."""
