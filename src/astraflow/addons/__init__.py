"""Parts that a first run does not need. The core finds each by an entry point, as it finds any package."""
