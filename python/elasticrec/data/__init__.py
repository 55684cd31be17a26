"""Data: what it is, what it says, and how its files become units and batches."""
