"""Publishing: a checkpoint becomes a version that is served."""
