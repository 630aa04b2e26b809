"""The detokenizer process: ids to text, stop strings, log-probabilities with their tokens."""
