"""The model repository: versions of a model, on a disk or in a store, from their first file to their last reader."""
