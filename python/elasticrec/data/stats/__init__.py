"""`data stats`: how well each slot and dense column of a job's data predicts the click.

- `collect`: reads the data twice: learns click rates on one part, measures on the other
- `sums`: sums over batches, and measurements on them
- `result`: the statistics
- `arrays`: counts by sign, AUC from a histogram, distance of distributions
- `unused`: slots and columns that the job does not use
- `report`: the statistics as text
"""
