"""What attention and its decompositions say a state depends on: the baselines of influence."""
