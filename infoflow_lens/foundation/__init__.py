"""What every room stands on: errors, the run's record, files and progress."""
