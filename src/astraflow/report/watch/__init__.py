"""The watchdog, which applies the rules of installed packages and says what is wrong with a run."""
