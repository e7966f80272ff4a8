"""The learning curve of a run, drawn with matplotlib."""
