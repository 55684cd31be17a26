"""The online store: processes that hold the rows of versions, and what brings versions to them."""
