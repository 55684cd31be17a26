"""`elasticrec audit`: recounts a run from its raw files, in code that shares nothing with what trained it."""
