"""Commands of the command line that are more than a call, a file for each."""
