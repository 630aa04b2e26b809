"""Parts of models that hold numbers of their own besides weights."""
