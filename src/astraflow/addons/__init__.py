"""Parts that a first run does not need. The core reaches them by entry points and by the module `added`."""
