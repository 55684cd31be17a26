"""Statistics of a data set: what each slot and column has to say about the click."""
