"""What a run needs on a machine that is not there: its programs, compiled and read."""
