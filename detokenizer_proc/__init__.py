"""The detokenizer process: token ids to text, stop strings, log-probabilities with their tokens."""
